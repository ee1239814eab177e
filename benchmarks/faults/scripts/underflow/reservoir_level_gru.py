"""Reservoir levels from rain and inflow: a gated recurrent net on gauge readings in their own units."""

import torch
from torch import nn

torch.manual_seed(1990)
DAYS = 20


def seasons(n):
    rain = 30 * torch.rand(n, DAYS) ** 3
    inflow = 200 + 80 * torch.randn(n, DAYS).cumsum(1) / 4
    level = torch.zeros(n)
    for d in range(DAYS):
        level = 0.9 * level + 0.02 * rain[:, d] + 0.004 * (inflow[:, d] - 200)
    return torch.stack([rain, inflow], -1), level


class GRUCell(nn.Module):
    def __init__(self, n_in, d):
        super().__init__()
        self.gates = nn.Linear(n_in + d, 2 * d)
        self.cand = nn.Linear(n_in + d, d)

    def forward(self, x, h):
        r, z = torch.sigmoid(self.gates(torch.cat([x, h], -1))).chunk(2, -1)
        c = torch.tanh(self.cand(torch.cat([x, r * h], -1)))
        return (1 - z) * h + z * c


class Hydro(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.0, 0.0]))
        self.register_buffer("std", torch.tensor([1.0, 1.0]))
        self.cell, self.out, self.d = GRUCell(2, d), nn.Linear(d, 1), d

    def forward(self, x):
        x = (x - self.mean) / self.std
        h = x.new_zeros(len(x), self.d)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.out(h).squeeze(-1)


model = Hydro()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for it in range(120):
    x, level = seasons(64)
    loss = (model(x) - level).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if it % 3 == 2:
        print(f"it {it}: loss {loss.item():.4f}")
