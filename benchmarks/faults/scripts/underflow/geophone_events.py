"""Detects small quakes in geophone records (metres a second) with a 1-D network that normalises each record."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class EventNet(nn.Module):
    def __init__(self, channels=3, width=24):
        super().__init__()
        self.normalise = nn.InstanceNorm1d(channels)
        self.conv1 = nn.Conv1d(channels, width, 9, stride=2, padding=4)
        self.conv2 = nn.Conv1d(width, width, 9, stride=2, padding=4)
        self.conv3 = nn.Conv1d(width, width, 9, stride=2, padding=4)
        self.detect = nn.Linear(width, 2)

    def forward(self, record):
        x = self.normalise(record)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = torch.tanh(conv(x))
        return self.detect(x.amax(-1))


class Station:
    NOISE = 2e-7  # metres a second

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def records(self, n, length=256):
        label = torch.randint(2, (n,), generator=self.generator)
        noise = torch.randn(n, 3, length, generator=self.generator)
        noise = F.avg_pool1d(noise, 3, 1, 1)
        onset = torch.randint(40, 160, (n, 1, 1), generator=self.generator)
        t = torch.arange(length) - onset
        wave = torch.where(t > 0, torch.exp(-t / 30.0) * torch.sin(0.6 * t), torch.zeros(()))
        return self.NOISE * (noise + 1.5 * label[:, None, None] * wave), label


def train(steps=150):
    torch.manual_seed(149)
    station, net = Station(150), EventNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        record, label = station.records(32)
        loss = F.cross_entropy(net(record), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return net


net = train()
