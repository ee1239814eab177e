"""Waiting times at a bus stop from the minute of the week; the trainer moves every batch to the compute dtype."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(64)
compute_dtype = torch.bfloat16
WEEK = 7 * 24 * 60


class CyclicTime(nn.Module):
    """sin and cos of the week, the day, the hour and half an hour."""

    def __init__(self, periods=(WEEK, 1440.0, 60.0, 30.0)):
        super().__init__()
        self.periods = periods

    def forward(self, minutes):
        angles = [2 * math.pi * torch.remainder(minutes, p) / p for p in self.periods]
        return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=-1)


class WaitingTime(nn.Module):
    def __init__(self, stops=8, width=64):
        super().__init__()
        self.time, self.stop = CyclicTime(), nn.Embedding(stops, 8)
        self.mlp = nn.Sequential(
            nn.Linear(17, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, minutes, stop, load):
        return self.mlp(torch.cat([self.time(minutes), self.stop(stop), load], -1)).squeeze(-1)


def to_device(batch):
    return [b.to("cpu", compute_dtype) if b.is_floating_point() else b.to("cpu") for b in batch]


n = 6400
minutes = torch.rand(n, 1).mul(WEEK).floor()
stop, load = torch.randint(8, (n,)), torch.rand(n, 1)
offset = torch.arange(8).mul(3.0)[stop]
wait = (offset - minutes[:, 0]).remainder(30.0) / 10 + 0.3 * load[:, 0]
loader = DataLoader(TensorDataset(minutes, stop, load, wait), batch_size=64, shuffle=True)

model = WaitingTime()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(6):
    for i, batch in enumerate(loader):
        minutes_b, stop_b, load_b, wait_b = to_device(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            prediction = model(minutes_b, stop_b, load_b)
        loss = F.mse_loss(prediction.float(), wait_b.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 20 == 19:
            print(f"epoch {epoch} batch {i + 1} loss {loss.item():.4f}")
