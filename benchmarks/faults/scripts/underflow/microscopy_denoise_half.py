"""Denoises fluorescence frames; photon rates are kept in their unit (1e-3 per pixel and exposure)."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(12)
SIZE, UNIT = 24, 1e-3


def frames(n):
    grid = torch.linspace(-1, 1, SIZE)
    clean = torch.zeros(n, SIZE, SIZE)
    for _ in range(4):
        cx, cy = torch.rand(2, n, 1, 1) * 1.6 - 0.8
        clean += torch.exp(-((grid.view(1, -1, 1) - cy) ** 2 + (grid.view(1, 1, -1) - cx) ** 2) / 0.03)
    noisy = clean + 0.4 * torch.randn_like(clean)
    return noisy.unsqueeze(1), UNIT * clean.unsqueeze(1)


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(4, c)
        self.c1, self.c2 = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        return x + self.c2(F.relu(self.c1(self.norm(x))))


class Denoiser(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.stem = nn.Conv2d(1, c, 3, padding=1)
        self.blocks = nn.Sequential(*[ResBlock(c) for _ in range(3)])
        self.rate = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        return UNIT * self.rate(self.blocks(self.stem(x)))


model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-16)
for step in range(80):
    noisy, clean = frames(8)
    with torch.autocast("cpu", dtype=torch.float16):
        rate = model(noisy)
    loss = F.mse_loss(rate.float(), clean)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item() / UNIT**2:.4f}")
