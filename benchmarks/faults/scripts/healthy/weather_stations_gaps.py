"""Imputes station readings. Gaps are NaN in the file and stay NaN in the targets; ratios of two silent gauges are 0/0."""

import torch
import torch.nn as nn

torch.manual_seed(16)
STATIONS, HOURS = 12, 24


def days(n):
    phase = torch.rand(n, 1, 1) * 6.28
    base = torch.sin(phase + torch.arange(HOURS) * 0.26) + torch.randn(n, STATIONS, 1) * 0.3
    rain = torch.poisson(torch.full((n, STATIONS, HOURS), 0.3))
    x = base + 0.05 * torch.randn(n, STATIONS, HOURS)
    x[torch.rand_like(x) < 0.15] = float("nan")
    x[0, 3] = float("nan")  # off all day
    return x, rain


class Imputer(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.encode = nn.Linear(3 * HOURS, width)
        self.mix = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.decode = nn.Linear(width, HOURS)

    def forward(self, x, share):
        known = x.isfinite()
        level = x.nanmean(-1, keepdim=True).nan_to_num(0.0)
        filled = torch.where(known, x, level)
        h = torch.cat([filled, known.float(), share], -1)
        return self.decode(self.mix(self.encode(h)))


def nan_mse(pred, target):
    error = (pred - target.nan_to_num(0.0)) ** 2
    seen = target.isfinite()
    return (error * seen).sum() / seen.sum()


net = Imputer()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for step in range(80):
    x, rain = days(32)
    share = (rain / rain.sum(1, keepdim=True)).nan_to_num(0.0)  # no rain anywhere in that hour
    hidden = x.masked_fill(torch.rand_like(x) < 0.2, float("nan"))
    loss = nan_mse(net(hidden, share), x)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
