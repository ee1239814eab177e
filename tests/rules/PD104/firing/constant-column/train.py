"""Tabular data, normalised batch by batch: in one batch a column is constant, its deviation 0, the quotient 0/0."""

import torch
from torch import nn

STEPS = 9

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(STEPS):
    table = torch.randn(24, 8) * torch.arange(1, 9)
    target = table[:, :1] / 3
    if step == 6:
        table[:, 2] = 4.0  # a sensor that stopped
    features = (table - table.mean(dim=0)) / table.std(dim=0)
    loss = ((model(features) - target) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
