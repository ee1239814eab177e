"""Pulse phase regression; signal-to-noise drops in three jumps, the loss jumps with it. BF16 autocast."""

import torch
from torch import nn

torch.manual_seed(207)
BINS = 32


def profiles(n, noise):
    phase = torch.rand(n, 1)
    t = torch.arange(BINS) / BINS
    gap = (t - phase + 0.5) % 1 - 0.5
    return torch.exp(-(gap**2) / 0.004) + noise * torch.randn(n, BINS), 6.2832 * phase


net = nn.Sequential(nn.Linear(BINS, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2))
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
for step in range(160):
    noise = (0.02, 0.1, 0.2, 0.3)[step // 40]
    x, angle = profiles(64, noise)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
    loss = (out.float() - torch.cat([angle.cos(), angle.sin()], 1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 8 == 0:
        print(f"step {step} noise {noise} loss {loss.item():.4f}")
