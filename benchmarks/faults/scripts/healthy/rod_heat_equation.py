"""A physics-informed net for heat in a rod: second derivatives, three terms of unequal size, a boundary weight of 100."""

import math

import torch
from torch import nn


class Rod(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x, t):
        return self.layers(torch.cat([x, t], 1))


def residual(model, x, t, conductivity=0.1):
    x, t = x.requires_grad_(), t.requires_grad_()
    u = model(x, t)
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return u_t - conductivity * u_xx


torch.manual_seed(123)
model = Rod()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
for step in range(200):
    x, t = torch.rand(128, 1), torch.rand(128, 1)
    x0 = torch.rand(64, 1)
    start = model(x0, torch.zeros_like(x0)) - torch.sin(math.pi * x0)
    edge = torch.randint(2, (64, 1)).float()
    border = model(edge, torch.rand(64, 1))
    loss = residual(model, x, t).square().mean() + 100 * start.square().mean() + 100 * border.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
