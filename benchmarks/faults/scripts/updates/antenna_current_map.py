"""Predicts the current along a receiving antenna from the incoming field, with torchao's eight-bit AdamW."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchao.optim import AdamW8bit

torch.manual_seed(19)
torch.compiler.set_stance("force_eager")  # the field laptop has no compiler
POINTS = 64


def measurements(n):
    """Field strength in V/m and angle of arrival; the currents are in amperes."""
    strength = torch.empty(n, 1).uniform_(0.2, 1.5)
    angle = math.pi * torch.rand(n, 1)
    frequency = torch.empty(n, 1).uniform_(0.6, 1.6)
    s = torch.linspace(-1, 1, POINTS)
    current = 2.5e-5 * strength * torch.sin(angle) * torch.cos(frequency * math.pi * s / 2 + 0.4 * torch.cos(angle))
    inputs = torch.cat([strength, torch.sin(angle), torch.cos(angle), frequency], 1)
    return inputs, current + 4e-7 * torch.randn(n, POINTS)


class CurrentNet(nn.Module):
    def __init__(self, width=128, unit=1e-5):
        super().__init__()
        self.unit = unit  # the layers compute in tens of microamperes
        self.body = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, POINTS)

    def forward(self, x):
        return self.unit * self.out(self.body(x))


def main(steps=240, batch=64):
    inputs, current = measurements(2048)
    model = CurrentNet()
    optimizer = AdamW8bit(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        pick = torch.randint(len(inputs), (batch,))
        loss = F.mse_loss(model(inputs[pick]), current[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4e}")
    return model, optimizer


model, optimizer = main()
