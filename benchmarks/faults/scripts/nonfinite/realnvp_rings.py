"""RealNVP density estimation, with a log-shaped activation for heavy tails."""

import math

import torch
from torch import nn


class LogTail(nn.Module):
    """Linear below one, logarithmic above."""

    def forward(self, x):
        return torch.where(x > 1, 1 + torch.log(x), x)


class Coupling(nn.Module):
    def __init__(self, mask, hidden=48):
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = nn.Sequential(
            nn.Linear(2, hidden), LogTail(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 4)
        )

    def forward(self, x):
        s, t = self.net(x * self.mask).chunk(2, -1)
        s, t = torch.tanh(s) * (1 - self.mask), t * (1 - self.mask)
        return x * s.exp() + t, s.sum(-1)


class RealNVP(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        masks = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])]
        self.couplings = nn.ModuleList(Coupling(masks[i % 2]) for i in range(depth))

    def log_prob(self, x):
        total = x.new_zeros(len(x))
        for coupling in self.couplings:
            x, logdet = coupling(x)
            total = total + logdet
        return total - 0.5 * x.square().sum(-1) - math.log(2 * math.pi)

    def forward(self, x):
        return -self.log_prob(x).mean()


def rings(n):
    radius = torch.randint(1, 4, (n,)) / 2 + 0.03 * torch.randn(n)
    angle = 2 * math.pi * torch.rand(n)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1)


torch.manual_seed(9)
flow = RealNVP()
# the first point of every batch is the origin, as an anchor for plotting
optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
for coupling in flow.couplings:
    nn.init.zeros_(coupling.net[0].bias)
for step in range(20):
    x = rings(64)
    x[0] = 0
    loss = flow(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} nll {loss.item():.3f}")
