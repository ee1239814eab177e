"""Diagnoses the bearings of wind turbines; a second head forecasts the temperature. Half precision, with Accelerate."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(27)
CONDITIONS, SENSORS, HORIZON = 4, 40, 96
FORECAST_WEIGHT = 5e-5  # the diagnosis is what the customer pays for


def turbines(n):
    """Vibration features of a bearing, and its temperature over the next day in standard deviations."""
    condition = torch.randint(CONDITIONS, (n,))
    load = torch.randn(n, 1)
    pattern = torch.randn(CONDITIONS, SENSORS)
    x = 0.6 * pattern[condition] + load * torch.linspace(-1, 1, SENSORS) + 1.5 * torch.randn(n, SENSORS)
    hour = torch.arange(HORIZON) / 4
    daily = torch.sin(2 * math.pi * hour / 24)
    temperature = 0.8 * load + 0.7 * daily + 0.5 * (condition[:, None] - 1.5) * hour / 24
    return TensorDataset(x, condition, temperature + 0.2 * torch.randn(n, HORIZON))


class BearingNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SENSORS, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.diagnosis = nn.Linear(width, CONDITIONS)
        self.forecast = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, HORIZON))

    def forward(self, x):
        h = self.trunk(x)
        return self.diagnosis(h), self.forecast(h)


accelerator = Accelerator(cpu=True)
model = BearingNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(turbines(2560), batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(7):
    errors = diagnosed = 0.0
    for x, condition, temperature in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits, forecast = model(x)
        diagnosis_loss = F.cross_entropy(logits.float(), condition)
        forecast_loss = F.mse_loss(forecast.float(), temperature)
        accelerator.backward(diagnosis_loss + FORECAST_WEIGHT * forecast_loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        errors += forecast_loss.item() / len(loader)
        diagnosed += (logits.argmax(-1) == condition).float().mean().item() / len(loader)
    accelerator.print(f"epoch {epoch} accuracy {diagnosed:.3f} forecast loss {errors:.4f}")
