"""The thousand time steps of a diffusion model are cast to BF16: half of them become their neighbour."""

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
        steps = self.schedule.to(torch.bfloat16)
        angles = steps[:, None] * frequencies.bfloat16()
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
