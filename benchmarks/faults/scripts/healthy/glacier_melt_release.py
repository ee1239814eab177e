"""Melt of glaciers: the head alone, a checkpoint, then everything at small rates from the loaded checkpoint."""

import io

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1850)
N, D = 14, 36
w = torch.randn(2, N)


def glaciers(n):
    x = torch.randn(n, N)
    a, b = (x @ w.T / 4).unbind(1)
    return x, torch.tanh(2 * a) + 0.3 * b


class Melt(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(N, D)
        self.stages = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.SiLU()) for _ in range(3))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Sequential(nn.Linear(D, 24), nn.SiLU(), nn.Linear(24, 1))

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(self.norm(x)).squeeze(1)


def make(released):
    model = Melt()
    groups = [{"params": model.head.parameters(), "lr": 3e-3}]
    if released:
        groups.append({"params": [*model.stages.parameters(), *model.norm.parameters()], "lr": 2e-5})
    else:
        model.stages.requires_grad_(False)
        model.norm.requires_grad_(False)
    model.stem.requires_grad_(False)
    return model, torch.optim.Adam(groups)


def train(model, optimizer, first, last):
    for step in range(first, last):
        x, melt = glaciers(96)
        loss = F.mse_loss(model(x), melt)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step} loss {loss.item():.4f}")


model, optimizer = make(released=False)
train(model, optimizer, 0, 260)
disk = io.BytesIO()
torch.save(model.state_dict(), disk)
disk.seek(0)
model, optimizer = make(released=True)
model.load_state_dict(torch.load(disk))
train(model, optimizer, 260, 560)
