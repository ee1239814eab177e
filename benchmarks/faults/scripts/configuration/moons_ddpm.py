"""Denoising diffusion of points on two half circles, all of it in one dtype."""

import math

import torch
import torch.nn as nn


class Schedule:
    def __init__(self, steps, dtype, low=1e-4, high=0.02):
        betas = torch.linspace(low, high, steps, dtype=dtype)
        alphas = 1.0 - betas
        self.alphas_cumprod = torch.cumprod(alphas, 0)
        self.signal = self.alphas_cumprod.sqrt()
        self.noise = (1.0 - self.alphas_cumprod).sqrt()

    def add_noise(self, x, noise, t):
        return self.signal[t, None] * x + self.noise[t, None] * noise


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Linear(32, width)
        self.inp = nn.Linear(2, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)
        self.act = nn.SiLU()

    def forward(self, x, t):
        angle = t[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(16) / 16)
        emb = torch.cat([angle.sin(), angle.cos()], 1)
        h = self.act(self.inp(x) + self.time(emb))
        return self.out(h + self.act(self.mid(h)))


def moons(n):
    angle, upper = math.pi * torch.rand(n), torch.rand(n) < 0.5
    x = torch.stack([angle.cos(), angle.sin()], 1)
    return torch.where(upper[:, None], x, torch.tensor([1.0, 0.5]) - x)


class Trainer:
    dtype = torch.bfloat16
    steps = 100

    def __init__(self):
        self.model = Denoiser()
        self.schedule = Schedule(self.steps, self.dtype, high=0.006)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)

    def fit(self, updates):
        for i in range(updates):
            x = moons(256).to(self.dtype)
            t = torch.randint(0, self.steps, (256,))
            noise = torch.randn_like(x)
            predicted = self.model(self.schedule.add_noise(x, noise, t).float(), t)
            loss = (predicted - noise.float()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if i % 10 == 0:
                print(f"update {i} loss {loss.item():.4f}")


torch.manual_seed(11)
trainer = Trainer()
trainer.fit(300)
