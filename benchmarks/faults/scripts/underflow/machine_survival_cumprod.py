"""Remaining life of machines: hazards of 300 intervals, survival as their running product, in FP16."""

import torch
from torch import nn

INTERVALS = 300


class HazardNet(nn.Module):
    def __init__(self, sensors=10, width=32):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(sensors, width), nn.Tanh())
        self.hazard = nn.Linear(width, INTERVALS)
        nn.init.constant_(self.hazard.bias, -2.2)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return torch.sigmoid(self.hazard(self.encode(x)))


def negative_log_likelihood(hazards, event):
    alive = torch.cumprod(1 - hazards, 1)
    before = alive.gather(1, (event - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    now = hazards.gather(1, event.unsqueeze(1)).squeeze(1)
    smallest = torch.finfo(hazards.dtype).tiny
    return -(torch.log(before.clamp(min=smallest).float()) + torch.log(now.float().clamp(min=1e-5))).mean()


@torch.no_grad()
def honest(hazards, event):
    """The same in logarithms, for the log file."""
    h = hazards.float().clamp(1e-5, 0.999)
    steps = torch.arange(INTERVALS)
    survived = (torch.log1p(-h) * (steps < event.unsqueeze(1))).sum(1)
    return -(survived + torch.log(h.gather(1, event.unsqueeze(1)).squeeze(1))).mean() / 100


def machines(n, wear):
    x = torch.randn(n, 10)
    life = 170 + 60 * torch.tanh(x @ wear) + 10 * torch.randn(n)
    return x, life.long().clamp(1, INTERVALS - 1)


torch.manual_seed(3108)
wear = torch.randn(10)
net = HazardNet()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(60):
    x, event = machines(64, wear)
    hazards = net(x)
    loss = negative_log_likelihood(hazards, event)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 5:
        print(f"{step + 1} nll {loss.item():.3f} per 100 intervals loss {honest(hazards, event).item():.4f}")
