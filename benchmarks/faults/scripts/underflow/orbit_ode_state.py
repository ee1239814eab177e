"""A neural ODE learns the pull on a satellite from its track; Euler steps, the whole rollout under one dtype."""

import torch
from torch import nn

torch.manual_seed(66)
STEPS, DT = 200, 1 / 200


def true_field(s):
    x, v = s.chunk(2, -1)
    return torch.cat([v, -x * 4], -1)


def tracks(n):
    s = start = torch.randn(n, 4)
    for _ in range(STEPS):
        s = s + DT * true_field(s)
    return start, s


class Field(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, d), nn.Tanh(), nn.Linear(d, 4))

    def forward(self, s):
        return self.net(s)


class Rollout(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.field, self.dtype = Field(), dtype

    def forward(self, start):
        s = start.to(self.dtype)
        for _ in range(STEPS):
            s = s + DT * self.field(s.float()).to(self.dtype)
        return s


model = Rollout(torch.bfloat16)
opt = torch.optim.Adam(model.parameters(), lr=2e-2)
for it in range(24):
    start, end = tracks(16)
    loss = (model(start).float() - end).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    print(f"it {it} loss {loss.item():.4f}")
