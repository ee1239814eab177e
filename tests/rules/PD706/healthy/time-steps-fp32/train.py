"""Angles in FP32 and cast afterwards; few integers, a mask of the most negative number and a sharp softmax in half."""

import math

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 6


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.signal, self.time, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.register_buffer("schedule", torch.arange(1000))

    def table(self):
        frequencies = torch.exp(-math.log(10000) * torch.arange(16) / 16)
        angles = self.schedule.float()[:, None] * frequencies
        order = torch.arange(200).bfloat16()
        mask = torch.full((8, 8), torch.finfo(torch.float32).min).triu(1).half()
        sharp = torch.softmax(angles[:8] * 40, dim=-1).half()
        angles = angles + 0 * (order[0] + mask.diagonal()[0] + sharp[0, 0])
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(self, x, t):
        return self.head((self.signal(x) + self.time(self.table()[t].float())).relu())


torch.manual_seed(0)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    clean, noise, t = torch.randn(64, 16), torch.randn(64, 16), torch.randint(0, 1000, (64,))
    level = (t / 1000)[:, None]
    loss = F.mse_loss(model((1 - level).sqrt() * clean + level.sqrt() * noise, t), noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
