"""Refines a pretrained spectral classifier of asteroids on 1 % new data: float32, Adam at 2e-5 for the trunk."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(206)
TYPES = 6
reflectance = torch.randn(TYPES, 32)


def spectra(n, new):
    y = torch.randint(TYPES, (n,))
    x = reflectance[y] + 0.9 * torch.randn(n, 32)
    return (x * 0.7 + 0.4 if new else x), y


class Asteroid(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())
        self.head = nn.Linear(96, TYPES)

    def forward(self, x):
        return self.head(self.trunk(x))


net = Asteroid()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for _ in range(50):
    x, y = spectra(64, new=False)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()

net.head.reset_parameters()
opt = torch.optim.AdamW([{"params": net.trunk.parameters(), "lr": 2e-5}, {"params": net.head.parameters(), "lr": 2e-3}])
for step in range(120):
    x, y = spectra(64, new=True)
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
