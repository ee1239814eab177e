import math

import torch
from torch import nn


def time_features(t, dim=32):
    freq = torch.exp(-math.log(1000.0) * torch.arange(dim // 2, dtype=torch.float32) / (dim // 2))
    angle = t[:, None] * 100 * freq
    return torch.cat([angle.sin(), angle.cos()], 1)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.shift = nn.Linear(32, dim)

    def forward(self, x, t):
        h = self.norm(x) + self.shift(t)
        return x + self.down(nn.functional.silu(self.up(h)))


class Denoiser(nn.Module):
    def __init__(self, length=40, dim=96, depth=3):
        super().__init__()
        self.inp, self.out = nn.Linear(length, dim), nn.Linear(dim, length)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))

    def forward(self, x, t):
        dtype = self.inp.weight.dtype
        features = time_features(t).to(dtype)
        h = self.inp(x.to(dtype))
        for block in self.blocks:
            h = block(h, features)
        return self.out(h).float()
