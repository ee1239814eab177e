"""Landmarks on faces; the weights to be shipped are a very slow average, in FP32 with a decay of 0.9998."""

import copy

import torch
from torch import nn


class Landmarks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(30, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.points = nn.Linear(64, 10)

    def forward(self, x):
        return self.points(self.body(x))


torch.manual_seed(110)
shape = torch.randn(4, 30)
model = Landmarks()
shadow = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(300):
    pose = torch.randn(64, 4)
    points = torch.cat([pose, pose[:, :1] * pose[:, 1:], pose[:, :3].sin()], 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(pose @ shape)
    loss = nn.functional.mse_loss(found.float(), points)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for s, p in zip(shadow.parameters(), model.parameters()):
            s.lerp_(p, 2e-4)
    if step % 15 == 14:
        print(f"step {step + 1} loss {loss.item():.4f}")
