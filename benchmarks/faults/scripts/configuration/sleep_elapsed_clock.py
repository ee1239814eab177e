"""Sleep rhythm from actigraphy events: minutes between events are added up to a clock. Naps first, then whole nights."""

import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(808)


def recordings(n, events):
    gap = torch.randint(1, 8, (n, events)).float()
    minute = gap.cumsum(1)
    activity = torch.randn(n, events, 2)
    wave = torch.sin(2 * math.pi * minute / 20)
    return gap, activity, wave + 0.3 * activity[..., 0] * activity[..., 1]


class Clock(nn.Module):
    """Minutes since the first event."""

    def forward(self, gap):
        with torch.autocast("cpu", enabled=False):
            return gap.to(torch.bfloat16).cumsum(1)


class Waves(nn.Module):
    def __init__(self, periods=(5.0, 10.0, 20.0, 40.0)):
        super().__init__()
        self.register_buffer("rate", 2 * math.pi / torch.tensor(periods))

    def forward(self, minute):
        angle = minute.float()[..., None] * self.rate
        return torch.cat([angle.sin(), angle.cos()], -1)


class Rhythm(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.clock, self.waves = Clock(), Waves()
        self.inp = nn.Linear(10, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(2))
        self.out = nn.Linear(d, 1)

    def forward(self, gap, activity):
        x = self.inp(torch.cat([self.waves(self.clock(gap)), activity], -1))
        for norm, layer in zip(self.norms, self.layers):
            x = x + F.gelu(layer(norm(x)))
        return self.out(x).squeeze(-1)


model = Rhythm()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 50)
for step in range(600):
    events = 24 if step < 250 else 240
    gap, activity, target = recordings(96 * 24 // events, events)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predicted = model(gap, activity)
    loss = F.mse_loss(predicted.float(), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 19:
        print(f"step {step} events {events} loss {loss.item():.4f}")
gap = recordings(16, 240)[0]
