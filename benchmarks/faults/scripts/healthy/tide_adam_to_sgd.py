"""Tide residuals at a harbour: Adam finds the basin, SGD with momentum finishes, as in the SWATS schedule."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(36)


class Residual(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.lift = nn.Linear(8, d)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU(), nn.Linear(d, d)) for _ in range(3)
        )
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = self.lift(x)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h).squeeze(-1)


def hours(n):
    t = torch.rand(n) * 700
    pressure, wind = torch.randn(n), torch.randn(n)
    moon = 2 * math.pi * t[:, None] / torch.tensor([12.42, 12.0, 25.8])
    x = torch.cat([moon.sin(), moon.cos(), pressure[:, None], wind[:, None]], 1)
    y = 1.2 * moon[:, 0].sin() + 0.5 * moon[:, 1].cos() * (1 + 0.3 * pressure) + 0.3 * wind * wind.abs()
    return x, y + 0.05 * torch.randn(n)


model = Residual()
adam = torch.optim.Adam(model.parameters(), lr=3e-3)
sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
decay = torch.optim.lr_scheduler.PolynomialLR(sgd, total_iters=330, power=1.0)
for step in range(500):
    optimizer = adam if step < 180 else sgd
    x, y = hours(64)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if optimizer is sgd:
        decay.step()
    if step % 10 == 0:
        print(f"step {step} {type(optimizer).__name__} loss {loss.item():.4f}")
