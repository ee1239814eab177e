"""The heat equation by a physics-informed network: a boundary weight of 1e5 and a loss that begins in the tens of thousands."""

import math

import torch
from torch import nn

torch.manual_seed(100)
net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)


def grad(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


for it in range(150):
    p = torch.rand(128, 2).requires_grad_()
    u = net(p)
    du = grad(u, p)
    residual = du[:, 1] - 0.1 * grad(du[:, 0], p)[:, 0]
    x0 = torch.rand(64, 1)
    initial = net(torch.cat([x0, torch.zeros_like(x0)], 1)) - torch.sin(math.pi * x0)
    t0 = torch.rand(64, 1)
    walls = torch.cat([net(torch.cat([w, t0], 1)) for w in (torch.zeros_like(t0), torch.ones_like(t0))])
    loss = residual.square().mean() + 1e5 * (initial.square().mean() + walls.square().mean())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 3 == 2:
        print(f"it {it} loss {loss.item():.2f}")
