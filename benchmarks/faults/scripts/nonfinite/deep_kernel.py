"""A deep arc-cosine kernel for Gaussian process regression, learnt by kernel-target alignment."""

import math

import torch
from torch import nn


class ArcCosineKernel(nn.Module):
    """Cho and Saul 2009, order 1."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        norms = a.norm(dim=-1)[:, None] * b.norm(dim=-1)[None, :]
        cosine = a @ b.T / norms
        theta = torch.acos(cosine)
        return self.log_variance.exp() * norms / math.pi * (theta.sin() + (math.pi - theta) * cosine)


class DeepKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8))
        self.kernel = ArcCosineKernel()
        self.log_noise = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x, y):
        z = self.features(x)
        gram = self.kernel(z, z) + self.log_noise.exp() * torch.eye(len(x))
        wanted = torch.outer(y, y)
        return -(gram * wanted).sum() / (gram.norm() * wanted.norm())


torch.manual_seed(0)
x = torch.rand(40, 3)
y = (4 * x[:, 0]).sin() - 0.5 + x[:, 1] ** 2 + 0.05 * torch.randn(40)
model = DeepKernel()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for i in range(10):
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    print(f"iteration {i}: {loss.item():.4f}")
