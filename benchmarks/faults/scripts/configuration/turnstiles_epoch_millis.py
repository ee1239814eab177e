"""Passengers at a turnstile by time of day; the time stamp in milliseconds is kept as a float32 column of the table."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

DAY = 3_600_000.0  # the lights repeat themselves every hour, in ms


class TurnstileNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.register_buffer("harmonics", torch.tensor([1.0, 2.0, 60.0, 120.0]))
        self.fc1 = nn.Linear(9, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, row):
        stamp, station = row[:, :1], row[:, 1:]
        phase = torch.remainder(stamp, DAY) / DAY * 2 * math.pi * self.harmonics
        x = torch.cat([phase.sin(), phase.cos(), station], 1)
        return self.out(F.relu(self.fc2(F.relu(self.fc1(x))))).squeeze(1)


def table(n):
    stamps = 1_764_000_000_000 + torch.randint(30 * 86_400_000, (n,))
    station = torch.rand(n, dtype=torch.float64)
    minute = (stamps % 60_000).double() / 60_000 * 2 * math.pi  # a train every minute
    people = 3 + 2 * torch.sin(minute) + station * torch.cos(2 * minute)
    return torch.stack([stamps.double(), station], 1).to(torch.float32), people.float()


torch.manual_seed(58)
rows, people = table(4000)
model = TurnstileNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(10):
    for idx in torch.randperm(len(rows)).split(128):
        loss = F.mse_loss(model(rows[idx]), people[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
