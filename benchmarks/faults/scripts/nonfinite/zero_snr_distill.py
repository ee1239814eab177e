"""Velocity-prediction diffusion of ring-shaped densities, schedule rescaled to end in pure noise, min-SNR weights."""

import math

import torch
from torch import Tensor, nn


class Schedule:
    def __init__(self, steps: int = 200):
        betas = torch.linspace(1e-3, 0.05, steps)
        root = (1 - betas).cumprod(0).sqrt()
        first, last = root[0].clone(), root[-1].clone()
        root = (root - last) * first / (first - last)  # the last step holds no signal, as at sampling time
        self.alpha = root
        self.sigma = (1 - root**2).sqrt()
        self.steps = steps

    def noisy(self, x: Tensor, t: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        a, s = self.alpha[t, None], self.sigma[t, None]
        return a * x + s * noise, a * noise - s * x

    def weight(self, t: Tensor, gamma: float = 5.0) -> Tensor:
        snr = self.alpha[t] ** 2 / self.sigma[t] ** 2
        return snr.clamp(max=gamma) / snr


class TimeEmbedding(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("freqs", torch.exp(torch.linspace(0, math.log(200.0), width // 2)))
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        angle = t[:, None] * self.freqs
        return self.mlp(torch.cat([angle.sin(), angle.cos()], -1))


class ResBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.shift = nn.Linear(width, width)
        nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return x + self.outer(nn.functional.silu(self.inner(self.norm(x) + self.shift(emb))))


class Denoiser(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3):
        super().__init__()
        self.stem = nn.Linear(2, width)
        self.time = TimeEmbedding(width)
        self.blocks = nn.ModuleList([ResBlock(width) for _ in range(depth)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb, h = self.time(t), self.stem(x)
        for block in self.blocks:
            h = block(h, emb)
        return self.head(h)


def rings(n: int) -> Tensor:
    angle = 2 * math.pi * torch.rand(n)
    radius = torch.randint(1, 3, (n,)) * 0.7 + 0.05 * torch.randn(n)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float = 0.99) -> None:
    for a, p in zip(average.parameters(), model.parameters(), strict=True):
        a.lerp_(p, 1 - decay)


def train(steps: int = 150, batch: int = 4) -> nn.Module:
    schedule, model, average = Schedule(), Denoiser(), Denoiser()
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.RAdam(model.parameters(), lr=2e-3)
    for step in range(steps):
        x = rings(batch)
        t = torch.randint(0, schedule.steps, (batch,))
        noisy, velocity = schedule.noisy(x, t, torch.randn_like(x))
        error = (model(noisy, t / schedule.steps) - velocity).square().mean(-1)
        loss = (schedule.weight(t) * error).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss became {loss.item()} in step {step}")
        update_average(average, model)
        if step % 20 == 0:
            print(f"step {step:4d} | loss {loss.item():.4f}")
    return average


if __name__ == "__main__":
    torch.manual_seed(8)
    train()
