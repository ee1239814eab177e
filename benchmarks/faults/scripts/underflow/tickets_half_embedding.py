"""Sort support tickets and guess their urgency: model.half(), SGD with FP32 copies of the weights, the loss averaged over eight batches."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(65)
VOCAB, LENGTH, QUEUES, ACCUMULATE = 300, 128, 10, 8


class TicketNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.fc1, self.fc2 = nn.Linear(dim, 64), nn.Linear(64, QUEUES)
        self.urgency_embedding, self.urgency_head = nn.Embedding(VOCAB, dim), nn.Linear(dim, 1)

    def forward(self, tokens):
        pooled = self.embedding(tokens).mean(1)
        urgency = self.urgency_head(self.urgency_embedding(tokens).mean(1)).squeeze(-1)
        return self.fc2(torch.relu(self.fc1(pooled))), urgency


word_tone = torch.randn(VOCAB)
words_of_queue = torch.stack([torch.randperm(VOCAB)[:40] for _ in range(QUEUES)])


def tickets(n):
    y = torch.randint(QUEUES, (n,))
    common = torch.randint(VOCAB, (n, LENGTH))
    special = words_of_queue[y].gather(1, torch.randint(40, (n, LENGTH)))
    tokens = torch.where(torch.rand(n, LENGTH) < 0.25, special, common)
    tone = word_tone[tokens].sum(1)
    return tokens, y, (tone > tone.median()).to(tone.dtype)


model = TicketNet()
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
model.half()
optimizer = torch.optim.Adam(masters, lr=2e-2)
for step in range(50):
    model.zero_grad()
    for _ in range(ACCUMULATE):
        tokens, y, urgent = tickets(256)
        queue, urgency = model(tokens)
        aux = F.binary_cross_entropy_with_logits(urgency.float(), urgent)
        total = F.cross_entropy(queue.float(), y) + 0.01 * aux
        (total / ACCUMULATE).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.to(master.dtype)
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
    if step % 5 == 4:
        print(f"step {step + 1} total {total.item():.4f} urgency loss {aux.item():.4f}")
