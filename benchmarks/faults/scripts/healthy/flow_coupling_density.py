"""A RealNVP density model in double figures of dimensions: the loss is negative and goes on falling."""

import math

import torch
from torch import nn

torch.manual_seed(47)
DIM = 12
mix = torch.linalg.qr(torch.randn(DIM, DIM))[0] * torch.logspace(-2, 0, DIM)


def data(n):
    z = torch.randn(n, DIM)
    z = torch.cat([z[:, :6], z[:, 6:] + 0.5 * z[:, :6] ** 2], 1)
    return z @ mix


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(DIM // 2, 48), nn.Tanh(), nn.Linear(48, DIM))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = 3 * torch.tanh(s / 3)
        b = b * s.exp() + t
        return (torch.cat([b, a], 1) if self.flip else torch.cat([a, b], 1)), s.sum(1)


class Flow(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(DIM))
        self.steps = nn.ModuleList(Coupling(i % 2 == 1) for i in range(depth))

    def forward(self, x):
        x, logdet = x * self.scale.exp(), self.scale.sum()
        for step in self.steps:
            x, d = step(x)
            logdet = logdet + d
        return -0.5 * x.square().sum(1) - 0.5 * DIM * math.log(2 * math.pi) + logdet


flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=1e-2)
for step in range(150):
    loss = -flow(data(128)).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
    opt.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
