"""Lifetime of fluorophores from photon counts in time bins; short traces first, full traces in the second phase."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(350)
BATCH = 12


def traces(n, bins):
    lifetime = 0.2 + torch.rand(n)
    t = torch.linspace(0, 3, bins)
    counts = torch.poisson(180 * torch.exp(-t / lifetime[:, None]) + 60.0)
    return torch.stack([counts, counts * t, t.expand(n, -1) * 50], -1), lifetime


class Pool(nn.Module):
    """All photons count."""

    def forward(self, x):
        return x.sum(1)


class Lifetime(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.bins = nn.Linear(3, d)
        self.pool = Pool()
        self.norm = nn.LayerNorm(d)
        self.up = nn.ModuleList(nn.Linear(d, 2 * d) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * d, d) for _ in range(3))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        x = self.norm(self.pool(F.relu(self.bins(x))))
        for up, down in zip(self.up, self.down):
            x = x + down(F.gelu(up(x)))
        return self.out(x).squeeze(1)


model = Lifetime()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)
for step in range(600):
    bins = 48 if step < 300 else 300
    x, lifetime = traces(BATCH, bins)
    with torch.autocast("cpu", torch.float16):
        predicted = model(x)
    loss = F.mse_loss(predicted.float(), lifetime)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 19:
        print(f"step {step} bins {bins} loss {loss.item():.5f}")
