"""Predicts the power draw of chillers from raw plant sensors, normalised by slowly moving statistics."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RunningNorm(nn.Module):
    """Normalises with moving averages in training as in use, so that both see the same numbers."""

    def __init__(self, features, momentum=0.004):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0).to(self.mean.dtype), self.momentum)
                spread = (x - self.mean).square().mean(0)
                self.var.lerp_(spread.to(self.var.dtype), self.momentum)
        return (x - self.mean.float()) / (self.var.float() + 1e-5).sqrt()


class PlantModel(nn.Module):
    def __init__(self, sensors, hidden=64):
        super().__init__()
        self.normalise = RunningNorm(sensors)
        self.layers = nn.Sequential(
            nn.Linear(sensors, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.layers(self.normalise(x)).squeeze(-1)


class Plant:
    def __init__(self, sensors=12):
        self.level = 20 + 60 * torch.rand(sensors)
        self.spread = 0.02 * self.level
        self.weights = torch.randn(2, sensors) / sensors**0.5

    def read(self, n):
        state = torch.randn(n, len(self.level))
        power = torch.sin(2 * state @ self.weights[0]) + (state @ self.weights[1])
        return self.level + self.spread * state, power + 0.05 * torch.randn(n)


def cast_buffers(module, dtype):
    for buffer in module.buffers():
        buffer.data = buffer.data.to(dtype)


torch.manual_seed(97)
plant = Plant()
model = PlantModel(sensors=12)
cast_buffers(model, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(1200):
    readings, power = plant.read(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predicted = model(readings)
    loss = F.mse_loss(predicted.float(), power)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
