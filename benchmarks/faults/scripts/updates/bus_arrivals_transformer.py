"""Delay of the next five stops from the last twelve, small transformer."""

import math

import torch
from torch import nn

torch.manual_seed(52)
PAST, NEXT = 12, 5


def trips(n):
    drift = 0.3 * torch.randn(n, 1)
    wave = torch.randn(n, 1) * torch.sin(torch.arange(PAST + NEXT) * 0.5 + 6.28 * torch.rand(n, 1))
    delay = drift * torch.arange(PAST + NEXT) / 5 + wave + 0.1 * torch.randn(n, PAST + NEXT)
    return delay[:, :PAST].unsqueeze(-1), delay[:, PAST:]


class Arrivals(nn.Module):
    def __init__(self, d=32, layers=2):
        super().__init__()
        self.inp = nn.Linear(1, d)
        pos = torch.arange(PAST).unsqueeze(1) * torch.exp(-math.log(100.0) * torch.arange(0, d, 2) / d)
        self.register_buffer("pos", torch.cat([pos.sin(), pos.cos()], 1))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.out = nn.Linear(PAST * d, NEXT)

    def forward(self, x):
        h = self.inp(x) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.out(h.flatten(1))


net = Arrivals()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-1)
for step in range(120):
    x, y = trips(64)
    loss = nn.functional.smooth_l1_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step:3d} loss {loss.item():.4f}")
