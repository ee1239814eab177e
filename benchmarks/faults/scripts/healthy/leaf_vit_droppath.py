"""Leaf shapes with a small vision transformer: LayerScale from 1e-5, stochastic depth, averaged weights at the end."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel

torch.manual_seed(38)
SPECIES, PATCHES, PIXELS, D = 6, 9, 16, 32
shapes = torch.randn(SPECIES, PATCHES, PIXELS) * 0.6


def leaves(n):
    y = torch.randint(SPECIES, (n,))
    return shapes[y] + torch.randn(n, PATCHES, PIXELS), y


class Block(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.drop = drop
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.scale1, self.scale2 = nn.Parameter(1e-5 * torch.ones(D)), nn.Parameter(1e-5 * torch.ones(D))

    def path(self, x):
        if not self.training or self.drop == 0:
            return x
        keep = (torch.rand(len(x), 1, 1) >= self.drop).float()
        return x * keep / (1 - self.drop)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.path(self.scale1 * self.proj(F.scaled_dot_product_attention(q, k, v)))
        return x + self.path(self.scale2 * self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.patch = nn.Linear(PIXELS, D)
        self.position = nn.Parameter(0.02 * torch.randn(PATCHES, D))
        self.blocks = nn.Sequential(*(Block(0.3 * i / (depth - 1)) for i in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, SPECIES))

    def forward(self, x):
        return self.head(self.blocks(self.patch(x) + self.position).mean(1))


model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
average, swa = AveragedModel(model), SWALR(optimizer, swa_lr=3e-4, anneal_epochs=20)
for step in range(320):
    x, y = leaves(24)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step >= 220:
        swa.step()
        average.update_parameters(model)
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f}")
