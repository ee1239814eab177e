import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def timestep_embedding(t, dim=32):
    freqs = torch.exp(-math.log(1000.0) * torch.arange(dim // 2) / (dim // 2))
    angle = 1000 * t[:, None] * freqs
    return torch.cat([angle.cos(), angle.sin()], 1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h):
        return h + self.fc2(F.silu(self.fc1(self.norm(h))))


class Denoiser(nn.Module):
    def __init__(self, dim=16, width=96, depth=2):
        super().__init__()
        self.inp, self.time = nn.Linear(dim, width), nn.Linear(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, dim)

    def forward(self, x, t):
        dtype = self.inp.weight.dtype
        h = self.inp(x.to(dtype)) + self.time(timestep_embedding(t).to(dtype))
        for block in self.blocks:
            h = block(h)
        return self.out(h).float()


class EMA:
    """Exponential moving average of a model's parameters."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, parameters):
        for s, p in zip(self.shadow, parameters):
            s.mul_(self.decay).add_(p.to(s.dtype), alpha=1 - self.decay)

    @torch.no_grad()
    def copy_to(self, model):
        for s, p in zip(self.shadow, model.parameters()):
            p.copy_(s)
