"""A physics-informed network for a bending beam in SI units: deflections are micrometres, and so is the loss, squared."""

import torch
from torch import nn


class Beam(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return 1e-6 * self.out(self.body(x))


def deflection(x):
    return 1e-6 * (torch.sin(3 * x) + 0.4 * x**2)


torch.manual_seed(0)
model = Beam()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(120):
    x = torch.rand(128, 1)
    loss = (model(x) - deflection(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4e}")
