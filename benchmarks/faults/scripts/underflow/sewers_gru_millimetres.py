"""Forecasts the level of a sewer with a GRU. Levels are in millimetres and rain in millilitres, as the loggers send them."""

import torch
import torch.nn as nn

SCALE = 1.0


class LevelGRU(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.gru = nn.GRU(3, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.gru(x / SCALE)
        return self.head(out[:, -1]).squeeze(1)


def windows(n, length=12):
    rain = 2000 * torch.rand(n, length) * (torch.rand(n, length) < 0.4)
    level = 1200 + 300 * torch.randn(n, 1) + (rain * 0.1).cumsum(1)
    pump = 500.0 * (torch.rand(n, length) < 0.5)
    target = rain[:, -1] / 1000 - pump[:, -3:].mean(1) / 500 + (level[:, -1] - 1200) / 400
    return torch.stack([rain, level, pump], 2), target


torch.manual_seed(64)
model = LevelGRU()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(150):
    x, y = windows(64)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
