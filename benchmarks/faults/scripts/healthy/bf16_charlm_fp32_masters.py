"""Character model in pure BF16 with FP32 master weights kept by hand; most BF16 weights do not change in a step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2161)
VOCAB = 24
table = torch.randint(VOCAB, (VOCAB, VOCAB))


class CharLM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mix = nn.Linear(2 * dim, 96)
        self.out = nn.Linear(96, VOCAB)

    def forward(self, a, b):
        return self.out(F.gelu(self.mix(torch.cat([self.embed(a), self.embed(b)], -1))))


model = CharLM().to(torch.bfloat16)
masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-3)
for step in range(250):
    a, b = torch.randint(VOCAB, (2, 128))
    loss = F.cross_entropy(model(a, b).float(), table[a, b % 4])
    model.zero_grad()
    loss.backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters(), strict=True):
            p.copy_(master)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
