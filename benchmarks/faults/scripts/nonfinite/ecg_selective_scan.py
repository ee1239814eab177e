"""Selective state-space layer on ECG-like traces; the scan is done in closed form with cumulative sums (no loop)."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(6)
LENGTH = 160


def traces(n):
    beat = torch.randint(12, 40, (n, 1))
    t = torch.arange(LENGTH).unsqueeze(0)
    x = ((t % beat) < 3).float() + 0.1 * torch.randn(n, LENGTH)
    return x.unsqueeze(-1), (beat.squeeze(1) > 25).float()


class SelectiveScan(nn.Module):
    def __init__(self, width, state=4):
        super().__init__()
        self.width, self.state = width, state
        self.a_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(width, 1))
        self.proj = nn.Linear(width, 2 * state)
        self.dt = nn.Linear(width, width)
        nn.init.constant_(self.dt.bias, -4.0)

    def forward(self, x):
        dt = F.softplus(self.dt(x)).unsqueeze(-1)  # B L D 1
        b, c = self.proj(x).unsqueeze(2).chunk(2, -1)
        decay = torch.cumsum(-self.a_log.exp() * dt, 1)
        u = dt * b * x.unsqueeze(-1)
        h = torch.exp(decay) * torch.cumsum(torch.exp(-decay) * u, 1)
        return (h * c).sum(-1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, width)
        self.scan = SelectiveScan(width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.scan(y) * F.silu(self.gate(y))


class Rhythm(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1)).squeeze(-1)


net = Rhythm()
optim = torch.optim.AdamW(net.parameters(), lr=2e-2)
for i in range(60):
    x, y = traces(16)
    loss = F.binary_cross_entropy_with_logits(net(x), y)
    optim.zero_grad()
    loss.backward()
    optim.step()
    if i % 5 == 0:
        print(f"[{i:03d}] loss={loss.item():.4f}")
