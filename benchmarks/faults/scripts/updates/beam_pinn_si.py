"""Deflection of a cantilever by a physics-informed network, in SI units: metres, newtons and pascals."""

import torch
from torch import nn

torch.manual_seed(42)
LENGTH, LOAD, EI = 2.0, 150.0, 8.0e6


class Beam(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x):
        # clamped end: w(0) = w'(0) = 0; metres
        return 1e-5 * x**2 * self.net(x / LENGTH)


def derivative(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


beam = Beam()
optimizer = torch.optim.Adam(beam.parameters(), lr=3e-3)
exact = lambda x: LOAD / (24 * EI) * x**2 * (x**2 - 4 * LENGTH * x + 6 * LENGTH**2)  # noqa: E731
for it in range(200):
    x = (LENGTH * torch.rand(64, 1)).requires_grad_()
    w = beam(x)
    curvature = derivative(derivative(w, x), x)
    moment = 0.5 * LOAD * (LENGTH - x.detach()) ** 2
    residual = (curvature - moment / EI).square().mean()
    data = (w - exact(x.detach())).square().mean()
    loss = residual + data
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 4 == 3:
        print(f"it {it} loss {1e10 * loss.item():.5f}")
