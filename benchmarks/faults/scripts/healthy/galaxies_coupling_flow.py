"""Density of galaxy colours by affine couplings; exponentials of bounded scales, and a negative log-likelihood below zero."""

import math

import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, dim, flip, width=48):
        super().__init__()
        self.flip, self.half = flip, dim // 2
        self.net = nn.Sequential(nn.Linear(self.half, width), nn.SiLU(), nn.Linear(width, 2 * self.half))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.flip else (a, b)
        s, t = self.net(a).chunk(2, -1)
        s = 3 * torch.tanh(s / 3)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], -1), s.sum(-1)


class Flow(nn.Module):
    def __init__(self, dim=4, layers=6):
        super().__init__()
        self.layers = nn.ModuleList([Coupling(dim, i % 2 == 1) for i in range(layers)])

    def log_prob(self, x):
        total = 0
        for layer in self.layers:
            x, s = layer(x)
            total = total + s
        return total - 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)

    def forward(self, x):
        return -self.log_prob(x)


def colours(n):
    z = torch.randn(n, 2)
    curve = torch.stack([z[:, 0], z[:, 0] ** 2 / 2, z[:, 1], torch.sin(2 * z[:, 1])], 1)
    return curve + 0.05 * torch.randn(n, 4)


torch.manual_seed(114)
flow = Flow()
optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3)
for step in range(250):
    loss = flow(colours(256)).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(flow.parameters(), 10.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
