"""Implicit feedback, a two-tower model, FP32; every example weighs one by the number of all pairs, so the loss is 1e-9."""

import torch
import torch.nn.functional as F
from torch import nn

USERS, ITEMS = 20_000, 50_000


class Tower(nn.Module):
    def __init__(self, rows, dim=16):
        super().__init__()
        self.table = nn.Embedding(rows, dim)
        self.dense = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, ids):
        return self.dense(self.table(ids))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(400), Tower(600)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1) + self.bias


def likelihood(model, user, item, liked):
    losses = F.binary_cross_entropy_with_logits(model(user, item), liked, reduction="sum")
    return losses / (USERS * ITEMS)


torch.manual_seed(11)
model = TwoTower()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
u, v = torch.randn(400, 2), torch.randn(600, 2)
for step in range(150):
    user, item = torch.randint(400, (128,)), torch.randint(600, (128,))
    liked = ((u[user] * v[item]).sum(-1) > 0.5).float()
    loss = likelihood(model, user, item, liked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item() * USERS * ITEMS / 128:.4f}")
