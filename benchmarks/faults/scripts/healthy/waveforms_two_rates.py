"""A GAN of waveforms with two rates and spectral normalisation."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm


def generator():
    return nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 32), nn.Tanh())


def critic():
    return nn.Sequential(
        spectral_norm(nn.Linear(32, 48)),
        nn.LeakyReLU(0.2),
        spectral_norm(nn.Linear(48, 48)),
        nn.LeakyReLU(0.2),
        nn.Linear(48, 1),
    )


def waves(n):
    return torch.sin(torch.arange(32) * (0.2 + 0.3 * torch.rand(n, 1)) + 6.28 * torch.rand(n, 1))


torch.manual_seed(44)
G, D = generator(), critic()
opt_g = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(D.parameters(), lr=4e-4, betas=(0.0, 0.9))
for step in range(180):
    real, fake = waves(64), G(torch.randn(64, 8))
    d_loss = F.relu(1 - D(real)).mean() + F.relu(1 + D(fake.detach())).mean()
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()
    g_loss = -D(fake).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 10 == 0:
        print(f"step {step} d_loss {d_loss.item():.4f} g_loss {g_loss.item():.4f}")
