"""Forecasting from counters that never stop counting: inputs grow a thousandfold; differences and logs tame them."""

import torch
import torch.nn.functional as F
from torch import nn


class Tame(nn.Module):
    """Rates of change and the logarithm of the level."""

    def forward(self, counters):
        rate = counters.diff(dim=1)
        return torch.cat([rate, torch.log1p(counters[:, 1:]) / 10], -1)


class Forecast(nn.Module):
    def __init__(self, meters=4, dim=32):
        super().__init__()
        self.tame, self.gru, self.out = Tame(), nn.GRU(2 * meters, dim, batch_first=True), nn.Linear(dim, meters)

    def forward(self, counters):
        _, h = self.gru(self.tame(counters))
        return self.out(h[0])


torch.manual_seed(67)
model = Forecast()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
level = torch.full((24, 1, 4), 10.0)
mean_rate = torch.rand(24, 1, 4) + 0.5
for step in range(120):
    t = torch.arange(13).view(1, -1, 1) + 12 * step
    flow = mean_rate * (1 + 0.5 * torch.sin(0.5 * t)) + 0.05 * torch.rand(24, 13, 4)
    counters = level + flow.cumsum(1)
    level = counters[:, -2:-1]
    loss = F.mse_loss(model(counters[:, :-1]), flow[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.5f}")
