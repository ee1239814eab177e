"""Crowding of metro platforms: FP16 autocast, activations recomputed, and a loss scale that starts far too high."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Plan:
    depth: int = 6
    width: int = 48
    batch: int = 64
    steps: int = 150
    scale: float = 2.0**24


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.f(x)


class Platform(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.enter = nn.Linear(9, plan.width)
        self.blocks = nn.ModuleList(Residual(plan.width) for _ in range(plan.depth))
        self.leave = nn.Linear(plan.width, 1)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.leave(x).squeeze(1)


def crowds(n):
    x = torch.randn(n, 9)
    return x, torch.relu(x[:, 0] * x[:, 1]) + x[:, 2].abs() - torch.sin(2 * x[:, 3])


def run(plan):
    torch.manual_seed(90)
    model = Platform(plan)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=plan.scale, growth_interval=60)
    for step in range(plan.steps):
        x, crowd = crowds(plan.batch)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            guess = model(x)
        loss = nn.functional.mse_loss(guess.float(), crowd)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if step % 6 == 0:
            print(f"step {step:3d} loss {loss.item():.4f} scale {scaler.get_scale():g}")


run(Plan())
