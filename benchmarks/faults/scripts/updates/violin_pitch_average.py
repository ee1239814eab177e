"""Pitch of violin tones from partials. A compact average of the weights is what will be shipped."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(440)
PARTIALS, STEPS = 16, 900
w = torch.randn(PARTIALS)


def tones(n, generator=None):
    x = torch.randn(n, PARTIALS, generator=generator)
    return x, torch.sin(x @ w / 2) + 0.2 * x[:, 0]


def network(d=48):
    body = []
    for _ in range(3):
        body += [nn.Linear(d, d), nn.LayerNorm(d), nn.SiLU()]
    return nn.Sequential(nn.Linear(PARTIALS, d), nn.SiLU(), *body, nn.Linear(d, 1))


class Average:
    def __init__(self, model, dtype):
        self.model = copy.deepcopy(model).to(dtype).requires_grad_(False)
        self.dtype = dtype

    def update(self, model, decay):
        for a, p in zip(self.model.parameters(), model.parameters()):
            a.mul_(decay).add_(p.detach().to(self.dtype), alpha=1 - decay)

    def loss(self, x, y):
        return F.mse_loss(self.model(x.to(self.dtype)).squeeze(1).float(), y)


model = network()
average = Average(model, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
held_out = tones(512, torch.Generator().manual_seed(1))
for step in range(STEPS):
    x, pitch = tones(96)
    loss = F.mse_loss(model(x).squeeze(1), pitch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    average.update(model, 0.9 if step < 250 else 0.995)
    if step % 50 == 49:
        with torch.no_grad():
            print(f"step {step} train {loss.item():.4f} average loss {average.loss(*held_out).item():.4f}")
gap = sum((a.float() - p).norm() ** 2 for a, p in zip(average.model.parameters(), model.parameters())) ** 0.5
