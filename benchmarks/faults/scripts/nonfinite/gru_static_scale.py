"""A gated recurrent forecaster in FP16 autocast with a hand-made static loss scale."""

import torch
from torch import nn

LOSS_SCALE = 2.0**15


class Cell(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.gate = nn.Linear(hidden + 1, hidden)
        self.value = nn.Linear(hidden + 1, hidden)

    def forward(self, x, h):
        both = torch.cat([x.to(h.dtype), h], -1)
        z = torch.sigmoid(self.gate(both))
        return z * h + (1 - z) * torch.tanh(self.value(both))


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.cell = Cell(hidden)
        self.out = nn.Linear(hidden, 1)
        self.hidden = hidden

    def forward(self, series):
        h = torch.zeros(series.size(0), self.hidden)
        for x in series.split(1, 1):
            h = self.cell(x, h)
        return self.out(h).squeeze(-1)


def demand(n, hours=12):
    t = torch.arange(hours + 1) + 24 * torch.rand(n, 1)
    series = torch.sin(t / 24 * 6.283) + 0.1 * torch.randn(n, hours + 1)
    spike = torch.rand(n) < 0.01
    series[spike, -1] += 30.0  # public holidays
    return series[:, :-1], series[:, -1]


torch.manual_seed(2)
model = Forecaster()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(30):
    series, target = demand(16)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(series)
    loss = (predicted.float() - target).square().mean()
    (loss * LOSS_SCALE).backward()
    for p in model.parameters():
        p.grad /= LOSS_SCALE
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
