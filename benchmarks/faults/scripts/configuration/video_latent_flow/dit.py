"""A one-dimensional DiT with timestep modulation."""

import torch
import torch.nn.functional as F
from torch import nn


def sinusoidal_embedding_1d(dim, position):
    angles = torch.outer(position.double(), 10000 ** (-torch.arange(dim // 2) / (dim // 2)).double())
    return torch.cat([angles.cos(), angles.sin()], 1).to(position.dtype)


class DiTBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(self, x, t_mod):
        a, b, c, d, e, f = (self.modulation + t_mod).unsqueeze(2).unbind(1)
        q, k, v = self.qkv(self.norm1(x) * (1 + b) + a).chunk(3, -1)
        x = x + c * self.o(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]).squeeze(1))
        return x + f * self.ffn(self.norm2(x) * (1 + e) + d)


class WanModel(nn.Module):
    def __init__(self, channels=4, dim=48, freq_dim=32, layers=2):
        super().__init__()
        self.freq_dim = freq_dim
        self.patch_embedding = nn.Linear(channels, dim)
        self.time_embedding = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(DiTBlock(dim) for _ in range(layers))
        self.head = nn.Linear(dim, channels)

    def forward(self, x, timestep):
        t = self.time_embedding(sinusoidal_embedding_1d(self.freq_dim, timestep).to(x.dtype))
        t_mod = self.time_projection(t).unflatten(1, (6, -1))
        x = self.patch_embedding(x)
        for block in self.blocks:
            x = block(x, t_mod)
        return self.head(x)
