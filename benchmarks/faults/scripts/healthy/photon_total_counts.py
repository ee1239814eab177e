"""Brightness of stars from photon counts: totals of more than a million, added in single precision, then a logarithm."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1609)
FILTERS, BINS = 8, 64


def stars(n, bright):
    colour = torch.randn(n, FILTERS)
    magnitude = torch.randn(n)
    rate = torch.exp(4.0 + 0.5 * magnitude[:, None] + 0.3 * colour) * (300.0 if bright else 1.0)
    counts = torch.poisson(rate[:, None].expand(-1, BINS, -1))
    return counts, magnitude + 0.2 * torch.tanh(colour[:, 0] * colour[:, 1])


class Totals(nn.Module):
    def forward(self, counts):
        with torch.autocast("cpu", enabled=False):
            total = counts.float().sum(1)
            return torch.log1p(total) - torch.log1p(total).mean(1, keepdim=True), torch.log1p(total).mean(
                1, keepdim=True
            )


class Brightness(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.totals = Totals()
        self.inp = nn.Linear(FILTERS + 1, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
        self.out = nn.Linear(d, 1)

    def forward(self, counts, exposure):
        colour, mean = self.totals(counts)
        x = self.inp(torch.cat([colour, mean - exposure], 1))
        for norm, layer in zip(self.norms, self.layers):
            x = x + F.gelu(layer(norm(x)))
        return self.out(x).squeeze(1)


model = Brightness()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=400)
for step in range(480):
    bright = step >= 220
    counts, magnitude = stars(64, bright)
    exposure = 8.2 + (5.7 if bright else 0.0)
    with torch.autocast("cpu", torch.float16):
        out = model(counts, exposure)
    loss = F.mse_loss(out.float(), magnitude)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 19:
        print(f"step {step} largest {counts.sum(1).max().item():.0f} loss {loss.item():.4f}")
