"""A 20-block residual tower on tabular data, FP32, without normalisation; every branch was given a gain of two."""

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, dim, gain=2.0):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.gain = gain
        nn.init.orthogonal_(self.fc1.weight)
        nn.init.orthogonal_(self.fc2.weight)

    def forward(self, x):
        return x + self.gain * self.fc2(F.leaky_relu(self.fc1(x)))


class Tower(nn.Module):
    def __init__(self, features=16, dim=32, depth=20):
        super().__init__()
        self.inp = nn.Linear(features, dim)
        self.blocks = nn.ModuleList(Residual(dim) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x)).squeeze(-1)


torch.manual_seed(0)
model = Tower()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for step in range(60):
    x = torch.randn(64, 16)
    y = x[:, 0] * x[:, 1] + torch.sin(3 * x[:, 2])
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
