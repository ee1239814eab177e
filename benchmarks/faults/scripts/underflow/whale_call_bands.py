"""Whale calls from band powers of a hydrophone: BatchNorm on the calibrated powers, a residual classifier behind it."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(5)
BANDS, SPECIES, STEPS = 40, 6, 450
templates = torch.rand(SPECIES, BANDS)


def recordings(n):
    species = torch.randint(SPECIES, (n,))
    gain = 0.5 + torch.rand(n, 1)
    power = gain * (0.5 + 0.35 * templates[species] + 0.15 * torch.randn(n, BANDS)).clamp(min=0.01)
    return power * 1e-7, species  # Pa^2


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.b(F.relu(self.a(self.norm(x))))


class Calls(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.input_norm = nn.BatchNorm1d(BANDS, eps=1e-5)
        self.stem = nn.Linear(BANDS, d)
        self.body = nn.Sequential(*[Residual(d) for _ in range(2)])
        self.drop = nn.Dropout(0.1)
        self.classify = nn.Linear(d, SPECIES)

    def forward(self, power):
        return self.classify(self.drop(self.body(self.stem(self.input_norm(power)))))


model = Calls()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS)
for step in range(STEPS):
    power, species = recordings(96)
    loss = F.cross_entropy(model(power), species)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 15 == 14:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    normed = model.input_norm(power)
