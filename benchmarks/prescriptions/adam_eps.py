"""Adam with an eps of 1e-4 on gradients of 1e-6: eps, not the second moment, decides how far a step goes."""

import torch
from torch import nn

torch.manual_seed(0)
STEPS = 96
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-4)
for _step in range(STEPS):
    x = torch.randn(256, 32)
    loss = 1e-3 * nn.functional.mse_loss(model(x), x[:, :8].sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4g}")
