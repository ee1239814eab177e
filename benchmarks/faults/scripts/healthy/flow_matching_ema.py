"""Rectified flow on two moons; an exponential moving average is kept for sampling and never trained."""

import copy
import math

import torch
import torch.nn as nn


class Velocity(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU())
        self.x_in = nn.Linear(2, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        freq = torch.exp(torch.linspace(0, math.log(100), 8))
        t = torch.cat([(t * freq).sin(), (t * freq).cos()], -1)
        return self.out(self.body(self.x_in(x) + self.time(t)))


def moons(n):
    angle, upper = math.pi * torch.rand(n), torch.rand(n) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return (torch.stack([x, y], 1) - torch.tensor([0.5, 0.25])) * 2 + 0.05 * torch.randn(n, 2)


@torch.no_grad()
def update_ema(ema, model, decay):
    for slow, fast in zip(ema.parameters(), model.parameters()):
        slow.lerp_(fast, 1 - decay)


@torch.no_grad()
def sample(model, n, steps=10):
    x = torch.randn(n, 2)
    for i in range(steps):
        x = x + model(x, torch.full((n, 1), i / steps)) / steps
    return x


def main():
    torch.manual_seed(7024)
    model = Velocity()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99))
    for step in range(120):
        x1 = moons(256)
        x0 = torch.randn_like(x1)
        t = torch.sigmoid(torch.randn(256, 1))
        loss = (model(x0 + t * (x1 - x0), t) - (x1 - x0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema(ema, model, min(0.999, (1 + step) / (10 + step)))
        if step % 5 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")
        if step % 40 == 39:
            print("samples spread", sample(ema, 128).std(0).tolist())


main()
