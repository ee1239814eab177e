"""A flow of affine couplings on two moons; zero weights at the end of every net, scales bounded by tanh."""

import math

import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        s = 2 * torch.tanh(s)
        y = torch.cat([a, b * s.exp() + t], 1)
        return (y.flip(1) if self.flip else y), s.squeeze(1)


class Flow(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(layers))

    def forward(self, x):
        logdet = 0.0
        for layer in self.layers:
            x, s = layer(x)
            logdet = logdet + s
        return 0.5 * x.square().sum(1) + math.log(6.2832) - logdet


def moons(n):
    a, side = math.pi * torch.rand(n), torch.rand(n) < 0.5
    x = torch.where(side, a.cos(), 1 - a.cos())
    y = torch.where(side, a.sin(), 0.5 - a.sin())
    return 4 * torch.stack([x, y], 1) + 0.2 * torch.randn(n, 2)


torch.manual_seed(3216)
flow = Flow()
optimizer = torch.optim.Adam(flow.parameters(), lr=4e-3)
for step in range(80):
    loss = flow(moons(128)).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f}")
