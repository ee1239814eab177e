"""Day-ahead electricity load from the last three days, with gradient accumulation."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(26)
HOURS, PAST, FUTURE = 4000, 72, 24
MICRO_BATCH, ACCUMULATE = 8, 8

clock = torch.arange(HOURS)
series = (
    torch.sin(2 * math.pi * clock / 24)
    + 0.5 * torch.sin(2 * math.pi * clock / 12 + 1)
    + 0.4 * torch.sin(2 * math.pi * clock / 168)
    + 0.1 * torch.randn(HOURS)
)
windows = series.unfold(0, PAST + FUTURE, 1)
train, val = windows[:3000], windows[3100:]


class LoadForecaster(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, channels, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(channels * PAST // 4, FUTURE)

    def forward(self, past):
        return self.head(self.conv(past[:, None]).flatten(1))


model = LoadForecaster()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
step = 0
for epoch in range(2):
    order = torch.randperm(len(train)).split(MICRO_BATCH)
    for i, idx in enumerate(order):
        optimizer.zero_grad()
        loss = F.mse_loss(model(train[idx, :PAST]), train[idx, PAST:]) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            step += 1
            if step % 10 == 0:
                with torch.no_grad():
                    val_loss = F.mse_loss(model(val[:, :PAST]), val[:, PAST:]).item()
                print(f"epoch {epoch} step {step} val loss {val_loss:.4f}")
