"""A listwise ranker, wholly in BF16, with torch's Adagrad: its sum of squares only grows, and then its steps are lost."""

import torch
import torch.nn.functional as F
from torch import nn


class Ranker(nn.Module):
    def __init__(self, items=200, dim=24):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.query = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, dim))
        self.cross = nn.Bilinear(dim, dim, 1)

    def forward(self, q, candidates):
        q = self.query(q).unsqueeze(1).expand(-1, candidates.shape[1], -1)
        return self.cross(q.contiguous(), self.items(candidates)).squeeze(-1)


torch.manual_seed(87)
taste, kind = torch.randn(10, 6), torch.randn(200, 6)
model = Ranker().to(torch.bfloat16)
optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-3, initial_accumulator_value=1.0)
for step in range(80):
    q = torch.randn(32, 10)
    candidates = torch.randint(200, (32, 8))
    best = torch.einsum("bd,bkd->bk", q @ taste, kind[candidates]).argmax(1)
    scores = model(q.bfloat16(), candidates).float()
    loss = F.cross_entropy(scores, best)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
