"""Masked affine flow on small grey images; pixels are mapped to the line by a logit first."""

import math

import torch
from torch import nn


class LogitPreprocess(nn.Module):
    """[0, 1] -> R, with its log determinant."""

    def forward(self, x):
        y = torch.logit(x)
        logdet = (nn.functional.softplus(y) + nn.functional.softplus(-y)).flatten(1).sum(1)
        return y, logdet


class ActNorm(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features))
        self.log_scale = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return (x + self.bias) * self.log_scale.exp(), self.log_scale.sum().expand(len(x))


class MaskedAffine(nn.Module):
    def __init__(self, features, hidden, parity):
        super().__init__()
        self.register_buffer("mask", (torch.arange(features) % 2 == parity).float())
        self.net = nn.Sequential(
            nn.Linear(features, hidden), nn.LeakyReLU(0.01), nn.Linear(hidden, hidden), nn.LeakyReLU(0.01)
        )
        self.out = nn.Linear(hidden, 2 * features)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        s, t = self.out(self.net(x * self.mask)).chunk(2, 1)
        s = torch.tanh(s) * (1 - self.mask)
        return x * s.exp() + t * (1 - self.mask), s.sum(1)


class Flow(nn.Module):
    def __init__(self, features=64, hidden=64, depth=4):
        super().__init__()
        self.preprocess = LogitPreprocess()
        self.steps = nn.ModuleList()
        for i in range(depth):
            self.steps += [ActNorm(features), MaskedAffine(features, hidden, i % 2)]

    def forward(self, images):
        z, logdet = self.preprocess(images.flatten(1))
        for step in self.steps:
            z, change = step(z)
            logdet = logdet + change
        prior = -0.5 * (z**2 + math.log(2 * math.pi)).sum(1)
        return prior + logdet


class Blobs(torch.utils.data.Dataset):
    """8-bit images of a soft spot; some are overexposed."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        grid = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"))
        centre = 2 + 4 * torch.rand(n, 2, 1, 1, generator=g)
        exposure = 90 + 4 * torch.randn(n, 1, 1, generator=g).abs() ** 3
        spot = exposure * torch.exp(-((grid - centre) ** 2).sum(1) / 8) + 20
        noise = 6 * torch.rand(n, 8, 8, generator=g)
        self.images = (spot + noise).clamp(0, 255).to(torch.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i].float() / 255


torch.manual_seed(0)
flow = Flow()
loader = torch.utils.data.DataLoader(Blobs(448, seed=1), batch_size=16)
opt = torch.optim.Adamax(flow.parameters(), lr=2e-3)
for i, images in enumerate(loader):
    nll = -flow(images).mean() / 64 / math.log(2)
    opt.zero_grad()
    nll.backward()
    opt.step()
    if i % 5 == 0:
        print(f"{i} bits/dim {nll.item():.3f}")
