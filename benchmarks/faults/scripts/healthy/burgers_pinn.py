"""Viscous Burgers' equation by a physics-informed network: derivatives by autograd, weighted boundary terms."""

import torch
import torch.nn as nn


class Solution(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, x, t):
        return self.net(torch.cat([x, 2 * t - 1], 1))


def derivative(u, x):
    return torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]


def residual(model, x, t, nu=0.05):
    x, t = x.requires_grad_(True), t.requires_grad_(True)
    u = model(x, t)
    u_x = derivative(u, x)
    return derivative(u, t) + u * u_x - nu * derivative(u_x, x)


def main():
    torch.manual_seed(7032)
    model = Solution()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for it in range(120):
        x, t = 2 * torch.rand(96, 1) - 1, torch.rand(96, 1)
        equation = residual(model, x, t).square().mean()
        x0 = 2 * torch.rand(48, 1) - 1
        initial = (model(x0, torch.zeros_like(x0)) + torch.sin(torch.pi * x0)).square().mean()
        tb = torch.rand(32, 1)
        walls = sum(model(torch.full_like(tb, side), tb).square().mean() for side in (-1.0, 1.0))
        loss = equation + 20 * initial + 20 * walls
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if it % 6 == 0:
            print(f"it {it:3d} loss {loss.item():.4f} equation {equation.item():.4f}")


main()
