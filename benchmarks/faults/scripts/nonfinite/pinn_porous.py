"""A physics-informed network for the porous medium equation u_t = (u^1.5)_xx."""

import torch
from torch import autograd, nn

torch.manual_seed(0)


class Solution(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))
        nn.init.constant_(self.net[-1].bias, 1.5)

    def forward(self, t, x):
        return self.net(torch.cat([t, x], 1))


def derivative(y, x):
    return autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def residual(u, t, x):
    pressure = u**1.5
    return derivative(u, t) - derivative(derivative(pressure, x), x), pressure


def barenblatt(x):
    return (1 - x**2).clamp(min=0)


model = Solution()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
for step in range(40):
    t = torch.rand(64, 1, requires_grad=True)
    x = (4 * torch.rand(64, 1) - 2).requires_grad_()
    x0 = 4 * torch.rand(64, 1) - 2
    imbalance, pressure = residual(model(t, x), t, x)
    inside = imbalance.square().mean() + 0.1 * (pressure.mean() - 0.5) ** 2  # the mean pressure was measured
    start = (model(torch.zeros_like(x0), x0) - barenblatt(x0)).square().mean()
    loss = 0.01 * inside + 10 * start
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: pde {inside.item():.4f} initial {start.item():.4f}")
