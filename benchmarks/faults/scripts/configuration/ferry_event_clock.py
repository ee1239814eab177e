"""Passenger flow on ferries: irregular door events with timestamps (seconds since departure)."""

import math
import torch
from torch import nn


class Clock(nn.Module):
    """Fourier features of time with periods from seconds to the whole crossing."""

    def __init__(self, dim, shortest=8.0, longest=4000.0, dtype=torch.bfloat16):
        super().__init__()
        n = dim // 2
        periods = shortest * (longest / shortest) ** (torch.arange(n) / (n - 1))
        self.register_buffer("omega", 2 * math.pi / periods)
        self.dtype = dtype

    def forward(self, t):
        phase = t.to(self.dtype).unsqueeze(-1) * self.omega.to(self.dtype)
        return torch.cat([phase.sin(), phase.cos()], dim=-1).float()


class EventEncoder(nn.Module):
    def __init__(self, kinds, d):
        super().__init__()
        self.kind = nn.Embedding(kinds, d)
        self.clock = Clock(32)
        self.fuse = nn.Linear(d + 32, d)

    def forward(self, kind, t):
        return torch.relu(self.fuse(torch.cat([self.kind(kind), self.clock(t)], -1)))


class FlowNet(nn.Module):
    def __init__(self, kinds=4, d=48):
        super().__init__()
        self.encoder = EventEncoder(kinds, d)
        self.mix1 = nn.Linear(d, d)
        self.mix2 = nn.Linear(d, d)
        self.mix3 = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)
        self.rate = nn.Linear(d, 1)

    def forward(self, kind, t):
        x = self.encoder(kind, t)
        x = x + torch.relu(self.mix1(x))
        x = x + torch.relu(self.mix2(x))
        x = x + torch.relu(self.mix3(x))
        return self.rate(self.norm(x)).squeeze(-1)


class Trainer:
    def __init__(self, net, lr=3e-3):
        self.net = net
        self.opt = torch.optim.AdamW(net.parameters(), lr=lr)

    def batch(self, n=16, events=32):
        t = torch.sort(torch.rand(n, events) * 3600, dim=1).values
        kind = torch.randint(4, (n, events))
        # doors cycle every eight seconds, each kind with its own phase
        rate = torch.sin(2 * math.pi * t / 8.0 + kind * math.pi / 2) + 0.3 * t / 3600
        return kind, t, rate + 0.05 * torch.randn_like(rate)

    def fit(self, steps):
        for i in range(steps):
            kind, t, rate = self.batch()
            loss = (self.net(kind, t) - rate).pow(2).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if not i % 10:
                print("iteration", i, "loss", f"{loss.item():.4f}")


torch.manual_seed(9)
trainer = Trainer(FlowNet())
trainer.fit(200)
