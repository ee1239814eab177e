"""Delays of trams: every step is clipped to a norm of 0.02, and the rate is set for that."""

import torch
from torch import nn


class Delay(nn.Module):
    def __init__(self, stops=12, d=32):
        super().__init__()
        self.stop = nn.Embedding(stops, d)
        self.cell = nn.LSTM(d + 1, d, batch_first=True)
        self.out = nn.Linear(d, 1)

    def forward(self, stop, load):
        h, _ = self.cell(torch.cat([self.stop(stop), load[..., None]], -1))
        return self.out(h)[..., 0]


class Line:
    def __init__(self, stops=12):
        self.dwell = 4 + 3 * torch.randn(stops)

    def rides(self, n=32, length=12):
        stop = (torch.randint(12, (n, 1)) + torch.arange(length)) % 12
        load = torch.rand(n, length)
        delay = (self.dwell[stop] * load).cumsum(1) + torch.randn(n, length)
        return stop, load, delay


def main():
    torch.manual_seed(64)
    line, net = Line(), Delay()
    opt = torch.optim.SGD(net.parameters(), lr=4.0, momentum=0.8)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 200)
    for i in range(200):
        stop, load, delay = line.rides()
        loss = (net(stop, load) - delay).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.02)
        opt.step()
        sched.step()
        if i % 10 == 0:
            print(f"{i}: loss {loss.item():.3f}, clipped from {norm.item():.1f}")


main()
