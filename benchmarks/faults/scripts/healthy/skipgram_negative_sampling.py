"""Skip-gram with negative sampling: context vectors start at zero, sparse gradients touch a few rows."""

import torch
import torch.nn as nn
import torch.nn.functional as F

WORDS, DIM = 400, 24


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.center = nn.Embedding(WORDS, DIM, sparse=True)
        self.context = nn.Embedding(WORDS, DIM, sparse=True)
        nn.init.uniform_(self.center.weight, -0.5 / DIM, 0.5 / DIM)
        nn.init.zeros_(self.context.weight)

    def forward(self, center, positive, negative):
        c = self.center(center)
        good = F.logsigmoid((c * self.context(positive)).sum(-1))
        bad = F.logsigmoid(-(self.context(negative) @ c.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return -(good + bad).mean()


torch.manual_seed(2164)
model = SkipGram()
optimizer = torch.optim.SparseAdam(model.parameters(), lr=2e-2)
for step in range(300):
    center = torch.randint(WORDS, (128,))
    positive = center // 20 * 20 + torch.randint(20, (128,))  # words of the same topic
    loss = model(center, positive, torch.randint(WORDS, (128, 5)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
