"""Soil types from permittivity profiles: instance statistics in one pass, as the CUDA kernel of the lab computes them."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(12)
N = 64


def profiles(n):
    soil = torch.randint(4, (n,))
    depth = torch.linspace(0, 1, N)
    shape = torch.stack([depth, depth**2, torch.sin(6 * depth), (depth > 0.5).float()])[soil]
    # raw sensor counts: a large pedestal, and little on it
    return 5000.0 + 1.5 * shape + 0.1 * torch.randn(n, N), soil


class OnePassNorm(nn.Module):
    def __init__(self, eps=1e-5, shifted=False):
        super().__init__()
        self.eps, self.shifted = eps, shifted

    def forward(self, x):
        if self.shifted:
            x = x - x[:, :1]
        mean = x.mean(-1, keepdim=True)
        var = (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
        return (x - mean) / (var + self.eps).sqrt()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = OnePassNorm()
        self.net = nn.Sequential(nn.Linear(N, 48), nn.GELU(), nn.Linear(48, 4))

    def forward(self, x):
        return self.net(self.norm(x))


model = Net()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(120):
    x, soil = profiles(64)
    loss = F.cross_entropy(model(x), soil)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 2 == 1:
        print(f"step {step} loss {loss.item():.4f}")
