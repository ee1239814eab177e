"""Frost damage in an orchard; the averaged weights are what is evaluated, and are kept in BF16 to fit beside the model."""

import copy

import torch
from torch import nn

AVERAGE_DTYPE = torch.bfloat16
DECAY = 0.995


class FrostNet(nn.Module):
    def __init__(self, sensors=12, width=48):
        super().__init__()
        self.sensors = nn.Linear(sensors, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.damage = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.relu(self.norm(self.sensors(x)))
        return self.damage(torch.relu(self.hidden(h))).squeeze(-1)


class PolyakAverage:
    def __init__(self, model):
        self.shadow = [p.detach().clone().to(AVERAGE_DTYPE) for p in model.parameters()]

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow, model.parameters()):
            s.mul_(DECAY).add_(p.to(s.dtype), alpha=1 - DECAY)

    @torch.no_grad()
    def evaluate(self, model, x, y):
        averaged = copy.deepcopy(model)
        for p, s in zip(averaged.parameters(), self.shadow):
            p.copy_(s)
        return nn.functional.mse_loss(averaged(x), y).item()


def nights(n):
    x = torch.randn(n, 12)
    return x, torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.5 * x[:, 3]


torch.manual_seed(83)
validation = nights(512)
model = FrostNet()
average = PolyakAverage(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1000):
    x, y = nights(64)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)
    if step % 50 == 49:
        print(f"{step + 1:4d}: train {loss.item():.4f}, averaged loss {average.evaluate(model, *validation):.4f}")
