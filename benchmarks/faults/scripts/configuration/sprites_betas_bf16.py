"""DDPM on small sprites. The schedule's tensors are made in the dtype of the pipeline, bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

WEIGHT_DTYPE = torch.bfloat16


class Schedule:
    def __init__(self, steps=1000, start=1e-4, end=0.02, dtype=WEIGHT_DTYPE):
        betas = torch.linspace(start, end, steps).to(dtype)
        self.steps = steps
        self.alphas = 1.0 - betas
        self.alphas_cumprod = torch.cumprod(self.alphas, 0)

    def add_noise(self, x, noise, t):
        a = self.alphas_cumprod[t].view(-1, 1, 1, 1)
        return a.sqrt().float() * x + (1 - a).sqrt().float() * noise


class Denoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.time = nn.Embedding(1000, width)
        self.conv_in = nn.Conv2d(1, width, 3, padding=1)
        self.conv_mid = nn.Conv2d(width, width, 3, padding=1)
        self.conv_out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.conv_in(x) + self.time(t)[..., None, None])
        h = F.silu(self.conv_mid(h) + h)
        return self.conv_out(h)


def sprites(n, size=8):
    half = (torch.rand(n, 1, size, size // 2) < 0.5).float() * 2 - 1
    return torch.cat([half, half.flip(-1)], -1)


torch.manual_seed(63)
schedule = Schedule()
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(250):
    x = sprites(32)
    t = torch.randint(0, 200, (32,))  # this expert serves the last fifth of the trajectory
    noise = torch.randn_like(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(schedule.add_noise(x, noise, t), t)
    loss = F.mse_loss(pred.float(), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
