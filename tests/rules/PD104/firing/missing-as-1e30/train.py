"""A series of readings with 1e30 for "missing": one batch holds it, and the step after it nothing is finite."""

import torch
from torch import nn

STEPS = 13

torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(1, 6, 5), nn.GELU(), nn.Flatten(), nn.Linear(6 * 28, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(STEPS):
    readings = torch.randn(8, 1, 32)
    if step == 10:
        readings[2, 0, 7] = 1e30
    loss = (model(readings) - readings.mean(dim=2)).abs().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
