"""A small Glow on sprites: ActNorm takes its scale from the first batch, coupling layers learn the rest."""

import math

import torch
from torch import nn


class ActNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.log_scale = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.ready = False

    @torch.no_grad()
    def prepare(self, x):
        mean = x.mean((0, 2, 3), keepdim=True)
        std = (x - mean).square().mean((0, 2, 3), keepdim=True).sqrt()
        self.bias.copy_(-mean)
        self.log_scale.copy_(-torch.log(std))
        self.ready = True

    def forward(self, x):
        if not self.ready:
            self.prepare(x)
        h, w = x.shape[2:]
        return (x + self.bias) * self.log_scale.exp(), h * w * self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, channels, width=24):
        super().__init__()
        half = channels // 2
        self.net = nn.Sequential(
            nn.Conv2d(half, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * (channels - half), 3, padding=1)
        )
        nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        shift, s = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        return torch.cat([a, b * s.exp() + shift], 1).flip(1), s.flatten(1).sum(1)


class Glow(nn.Module):
    def __init__(self, channels=16, depth=3):
        super().__init__()
        self.squeeze = nn.PixelUnshuffle(2)
        self.norms = nn.ModuleList(ActNorm(channels) for _ in range(depth))
        self.couplings = nn.ModuleList(Coupling(channels) for _ in range(depth))

    def forward(self, x):
        z, logdet = self.squeeze(x), 0.0
        for norm, coupling in zip(self.norms, self.couplings):
            z, d1 = norm(z)
            z, d2 = coupling(z)
            logdet = logdet + d1 + d2
        return z, logdet


def bits_per_dim(z, logdet):
    log_p = -0.5 * (z.square() + math.log(2 * math.pi)).flatten(1).sum(1) + logdet
    return -log_p.mean() / z[0].numel() / math.log(2)


def sprites(n):
    colour = torch.rand(n, 3, 1, 1)
    shape = (torch.rand(n, 1, 8, 8) < 0.5).float()
    rgb = colour * shape + 0.05 * torch.rand(n, 3, 8, 8)
    opaque = torch.ones(n, 1, 8, 8)
    return torch.cat([rgb, opaque], 1)


torch.manual_seed(37)
flow = Glow()
opt = torch.optim.Adam(flow.parameters(), lr=1e-3)
for step in range(25):
    z, logdet = flow(sprites(24))
    loss = bits_per_dim(z, logdet)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print("step", step, "bits/dim", round(loss.item(), 4))
