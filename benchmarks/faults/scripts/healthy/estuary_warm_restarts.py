"""Tide levels in an estuary: cosine cycles with restarts after a warm-up that begins at almost nothing."""

import math

import torch
from torch import nn

torch.manual_seed(51)


class Estuary(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.rnn = nn.GRU(2, d, batch_first=True)
        self.ff = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU(), nn.Linear(d, 1))

    def forward(self, x):
        return self.ff(self.rnn(x)[0]).squeeze(-1)


def tides(n=24, length=20):
    t = torch.arange(length + 1) * 0.5 + 50 * torch.rand(n, 1)
    level = torch.sin(t * 0.52) + 0.4 * torch.sin(t * 0.49 + 1)
    wind = torch.randn(n, length + 1).cumsum(1) * 0.1
    level = level + wind
    return torch.stack([level, wind], -1)[:, :-1], level[:, 1:]


def rate(step, peak=2e-2, warmup=40, cycle=60):
    if step < warmup:
        return peak * 10 ** (-5 * (1 - step / warmup))
    return peak * 0.5 * (1 + math.cos(math.pi * ((step - warmup) % cycle) / cycle)) + 1e-6


net = Estuary()
opt = torch.optim.Adam(net.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, rate)
for step in range(220):
    x, y = tides()
    loss = nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
    if step % 5 == 0:
        print(f"{step} lr {schedule.get_last_lr()[0]:.2e} loss {loss.item():.4f}")
