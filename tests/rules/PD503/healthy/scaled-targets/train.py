"""The same fit with outputs of order one, and a head that starts at zero."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, UNIT = 10, 1.0

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
nn.init.zeros_(model[2].weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for step in range(STEPS):
    loads = torch.randn(64, 8)
    displacement = UNIT * torch.stack([loads[:, :4].sum(1), loads[:, 4:].sin().sum(1)], dim=1)
    loss = F.mse_loss(UNIT * model(loads), displacement)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4g}")
