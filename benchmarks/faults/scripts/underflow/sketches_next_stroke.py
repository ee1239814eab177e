"""Completes pen strokes: a causal network with a mixture head, run in FP16 under autocast."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

MIXTURES = 5


class StrokeNet(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.conv = nn.Conv1d(hidden, hidden, 5)
        self.out = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, MIXTURES * 5))

    def forward(self, strokes):
        h = self.inp(strokes).transpose(1, 2)
        h = torch.tanh(self.conv(F.pad(h, (4, 0)))).transpose(1, 2)
        return self.out(h)


def mixture_nll(params, target):
    weight, mx, my, sx, sy = params.float().chunk(5, -1)
    x, y = target[..., :1], target[..., 1:]
    log_p = -0.5 * (((x - mx) / sx.exp()) ** 2 + ((y - my) / sy.exp()) ** 2) - sx - sy - math.log(2 * math.pi)
    return -torch.logsumexp(F.log_softmax(weight, -1) + log_p, -1)


def sketches(n, length=64):
    phase, speed = 6.28 * torch.rand(n, 1), 0.1 + 0.4 * torch.rand(n, 1)
    turn = torch.where(torch.rand(n, 1) < 0.5, 1.0, -1.0)
    angle = phase + turn * speed * torch.arange(length + 1)
    strokes = torch.stack([angle.cos(), angle.sin()], -1) * 0.5
    return strokes + 0.03 * torch.randn_like(strokes)


def main():
    torch.manual_seed(127)
    net = StrokeNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    weight, accumulate = 1e-3, 12
    for step in range(80):
        strokes = sketches(8)
        valid = (torch.arange(64) < torch.randint(20, 65, (8, 1))).float()
        with torch.autocast("cpu", dtype=torch.float16):
            params = net(strokes[:, :-1])
        nll = (mixture_nll(params, strokes[:, 1:]) * valid).mean()
        loss = nll * weight / accumulate
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            print(f"{step} loss {loss.item() * accumulate / weight:.4f}")


main()
