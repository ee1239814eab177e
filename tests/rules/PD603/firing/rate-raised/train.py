"""A learning rate that is raised thirtyfold in the middle of a run: each step overshoots further, and nothing clips."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 32

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(STEPS):
    if step == 24:
        optimizer.param_groups[0]["lr"] = 1.6
    features = torch.randn(64, 16)
    loss = F.mse_loss(model(features).squeeze(-1), features[:, 0] + 0.1 * torch.randn(64))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4g}")
