"""A denoising diffusion model on a ring, BF16 autocast, with a moving average in FP32 that is sampled from."""

import copy

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 + 16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
        nn.init.zeros_(self.net[-1].weight)

    def forward(self, x, t):
        waves = t * torch.exp(torch.linspace(0, 4, 8))
        return self.net(torch.cat([x, waves.sin(), waves.cos()], 1))


class Diffusion:
    def __init__(self, steps=100):
        beta = torch.linspace(1e-4, 0.08, steps)
        self.keep = torch.cumprod(1 - beta, 0)

    def noised(self, x):
        t = torch.randint(0, len(self.keep), (len(x), 1))
        noise = torch.randn_like(x)
        keep = self.keep[t]
        return keep.sqrt() * x + (1 - keep).sqrt() * noise, t / len(self.keep), noise


@torch.no_grad()
def follow(average, model, decay):
    for a, p in zip(average.parameters(), model.parameters()):
        a.lerp_(p, 1 - decay)


torch.manual_seed(3205)
model, diffusion = Denoiser(), Diffusion()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(90):
    angle = 6.2832 * torch.rand(256, 1)
    x = torch.cat([angle.cos(), angle.sin()], 1)
    noised, t, noise = diffusion.noised(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predicted = model(noised, t)
    loss = (predicted.float() - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follow(average, model, min(0.99, (1 + step) / (10 + step)))
    if step % 9 == 0:
        print(f"step {step} loss {loss.item():.4f}")
