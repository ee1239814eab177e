"""Four simulated workers fit a soft-sensor network; they exchange gradients in FP8 to save bandwidth."""

import torch
import torch.nn as nn
import torch.nn.functional as F

WORKERS = 4


class SoftSensor(nn.Module):
    def __init__(self, signals=30, hidden=96):
        super().__init__()
        self.lift = nn.Linear(signals, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU()) for _ in range(3)
        )
        self.quality = nn.Linear(hidden, 4)

    def forward(self, x):
        x = self.lift(x)
        for block in self.blocks:
            x = x + block(x)
        return self.quality(x)


def all_reduce(gradients, wire=torch.float8_e5m2):
    received = [g.to(wire).to(g.dtype) for g in gradients]
    return sum(received) / len(received)


class Plant:
    def __init__(self, signals=30):
        self.a, self.b = torch.randn(signals, 16) / signals**0.5, torch.randn(16, 4)

    def batch(self, n):
        x = torch.randn(n, self.a.shape[0])
        return x, torch.sin(2 * x @ self.a) @ self.b / 4


def train(steps=150):
    torch.manual_seed(167)
    plant, model = Plant(), SoftSensor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)
    params = list(model.parameters())
    for step in range(steps):
        shares, losses = [], []
        for _ in range(WORKERS):
            x, y = plant.batch(32)
            loss = F.mse_loss(model(x), y) * 2e-4  # its weight beside the plant's energy balance
            shares.append(torch.autograd.grad(loss, params))
            losses.append(loss.item() * 5e3)
        for p, gradients in zip(params, zip(*shares)):
            p.grad = all_reduce(gradients)
        optimizer.step()
        if step % 3 == 0:
            print(f"step {step} loss {sum(losses) / WORKERS:.5f}")


train()
