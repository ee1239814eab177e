"""Luminosities of stars in watts: the outputs are 1e26 and the loss is scaled by the same number, all in FP32."""

import torch
import torch.nn as nn
import torch.nn.functional as F

SUN = 3.828e26


class MassLuminosity(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.watts = nn.Identity()

    def forward(self, x):
        return self.watts(SUN * self.body(x).squeeze(-1))


torch.manual_seed(2173)
model = MassLuminosity()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(200):
    x = torch.rand(64, 2)
    watts = SUN * (0.4 + 1.3 * x[:, 0]).pow(3.5) * (0.8 + 0.4 * x[:, 1])
    loss = F.mse_loss(model(x) / SUN, watts / SUN)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
