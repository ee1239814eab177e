"""Wave height from buoy spectra. FreezeOut: each layer's rate is annealed to zero at its own time, the first layers early."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(58)
STEPS, BINS = 450, 32


def spectra(n):
    peak, height, spread = torch.rand(n) * 0.6 + 0.2, torch.rand(n) * 3 + 0.5, torch.rand(n) * 0.1 + 0.05
    f = torch.linspace(0, 1, BINS)
    s = height[:, None] ** 2 * torch.exp(-(((f - peak[:, None]) / spread[:, None]) ** 2))
    return (s * (1 + 0.2 * torch.randn(n, BINS))).clamp(min=0).log1p(), height * (1 - peak)


class BuoyNet(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        sizes = [BINS, d, d, d]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(i, o), nn.LayerNorm(o), nn.SiLU()) for i, o in zip(sizes, sizes[1:])
        )
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x).squeeze(-1)


model = BuoyNet()
groups, ends = [], []
for i, part in enumerate([*model.layers, model.out]):
    groups.append({"params": part.parameters()})
    ends.append(STEPS * (0.4 + 0.2 * i))
optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.0)


def annealed(end):
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(step / end, 1.0)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [annealed(e) for e in ends])
for step in range(STEPS):
    x, y = spectra(48)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 9 == 0:
        print(f"step {step} rates {' '.join(f'{r:.1e}' for r in scheduler.get_last_lr())} loss {loss.item():.4f}")
