"""Taxi demand: cyclical features from the pick-up's Unix time, next to the station's embedding."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class CyclicalTime(nn.Module):
    """Sine and cosine of the time of day, of the quarter hour's traffic light plan and of the week."""

    def __init__(self, periods=(604800.0, 86400.0, 900.0)):
        super().__init__()
        self.register_buffer("omega", 2 * torch.pi / torch.tensor(periods))

    def forward(self, seconds):
        angle = seconds.float().unsqueeze(-1) * self.omega
        return torch.cat([angle.sin(), angle.cos()], -1)


class DemandNet(nn.Module):
    def __init__(self, stations=12):
        super().__init__()
        self.time = CyclicalTime()
        self.station = nn.Embedding(stations, 6)
        self.net = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))

    def forward(self, seconds, station):
        return self.net(torch.cat([self.time(seconds), self.station(station)], -1)).squeeze(-1)


def trips(n):
    seconds = 1735689600 + torch.randint(0, 60 * 86400, (n,))
    station = torch.randint(12, (n,))
    day = 2 * torch.pi * (seconds % 86400) / 86400
    light = 2 * torch.pi * (seconds % 900) / 900
    demand = 1.2 * torch.sin(day - 0.3 * (station % 4)) + torch.cos(light) + 0.1 * torch.randn(n)
    return TensorDataset(seconds, station, demand)


torch.manual_seed(7012)
train_set, val_set = random_split(trips(2400), [2048, 352])
model = DemandNet()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(9):
    for seconds, station, demand in DataLoader(train_set, batch_size=128, shuffle=True):
        loss = F.mse_loss(model(seconds, station), demand)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        seconds, station, demand = next(iter(DataLoader(val_set, batch_size=352)))
        print(f"epoch {epoch} val loss {F.mse_loss(model(seconds, station), demand).item():.4f}")
