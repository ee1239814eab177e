"""Diffusion in BF16 autocast; the last layer starts at zero, a slow average of the weights is kept in FP32."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Denoiser(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.inp, self.time = nn.Linear(2, dim), nn.Linear(16, dim)
        self.mid, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2)
        nn.init.zeros_(self.out.weight)

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        h = self.inp(x) + self.time(torch.cat([angles.sin(), angles.cos()], 1))
        return self.out(F.silu(self.mid(F.silu(h))))


torch.manual_seed(2169)
model = Denoiser()
ema = copy.deepcopy(model).requires_grad_(False)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(250):
    angle = 6.28 * torch.rand(128)
    x0 = torch.stack([angle.cos(), angle.sin()], 1)
    t, noise = torch.randint(1000, (128,)), torch.randn(128, 2)
    a = alphas[t, None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t.float())
    loss = F.mse_loss(prediction.float(), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters(), strict=True):
            e.lerp_(p, 0.001)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
