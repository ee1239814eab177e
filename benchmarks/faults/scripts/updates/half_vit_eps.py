"""A patch mixer entirely in FP16; Adam's eps was raised to 1e-3 because 1e-8 is zero in FP16."""

import torch
import torch.nn.functional as F
from torch import nn


class Mixer(nn.Module):
    def __init__(self, patches=16, dim=24):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, dim))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MixerNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.mixers = nn.Sequential(Mixer(), Mixer())
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 6)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.mixers(x)).mean(1))


torch.manual_seed(0)
model = MixerNet().half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-3)
prototypes = torch.randn(6, 3, 16, 16)
for step in range(60):
    y = torch.randint(6, (64,))
    x = (prototypes[y] + 2 * torch.randn(64, 3, 16, 16)).half()
    loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
