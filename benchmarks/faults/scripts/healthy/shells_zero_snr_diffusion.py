"""Outlines of shells by diffusion with a terminal signal of exactly zero: the network predicts v, its last layer is zero."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 100


def zero_terminal_schedule():
    root = torch.cumprod(1 - torch.linspace(1e-4, 0.08, STEPS), 0).sqrt()
    return (root - root[-1]) * root[0] / (root[0] - root[-1])


class Denoiser(nn.Module):
    def __init__(self, points=24, width=96):
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.inp = nn.Linear(2 * points, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2 * points)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        return self.out(h + F.silu(self.mid(h)))


def shells(n):
    angle = torch.linspace(0, 6.2832, 24)
    radius = torch.exp((0.1 + 0.15 * torch.rand(n, 1)) * angle) / 1.5
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)


torch.manual_seed(116)
signal = zero_terminal_schedule()
noise_level = (1 - signal**2).clamp(min=0).sqrt()
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(300):
    x, t = shells(96), torch.randint(STEPS, (96,))
    noise, a, s = torch.randn_like(x), signal[t, None], noise_level[t, None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = model(a * x + s * noise, t)
    loss = F.mse_loss(v.float(), a * noise - s * x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print(f"step {step + 1} loss {loss.item():.4f}")
