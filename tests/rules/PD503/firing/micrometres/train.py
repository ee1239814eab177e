"""Displacements in metres where micrometres matter: gradients are a hundred thousand times smaller than eps."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, UNIT = 10, 1e-6

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for step in range(STEPS):
    loads = torch.randn(64, 8)
    displacement = UNIT * torch.stack([loads[:, :4].sum(1), loads[:, 4:].sin().sum(1)], dim=1)
    loss = F.mse_loss(UNIT * model(loads), displacement)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4g}")
