"""Dropout and random crops: no two passes are alike, and none is non-finite."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 12

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    start = torch.randint(8, ())
    x, y = torch.randn(32, 16)[:, start : start + 8], torch.randint(3, (32,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
