"""A conditional GAN with spectral norm and hinge loss on small glyphs; two discriminator steps per generator step."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm

CLASSES, PIXELS = 4, 64


class Generator(nn.Module):
    def __init__(self, z=16, width=64):
        super().__init__()
        self.label = nn.Embedding(CLASSES, z)
        self.net = nn.Sequential(
            nn.Linear(2 * z, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, PIXELS), nn.Tanh()
        )

    def forward(self, z, y):
        return self.net(torch.cat([z, self.label(y)], 1))


class Discriminator(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(
            spectral_norm(nn.Linear(PIXELS, width)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(width, width)),
            nn.LeakyReLU(0.2),
        )
        self.score = spectral_norm(nn.Linear(width, 1))
        self.label = spectral_norm(nn.Embedding(CLASSES, width))

    def forward(self, x, y):
        h = self.body(x)
        return self.score(h).squeeze(1) + (h * self.label(y)).sum(1)


def glyphs(n):
    y = torch.randint(CLASSES, (n,))
    grid = torch.linspace(0, 6.28, PIXELS)
    return torch.sin(grid * (y[:, None] + 1) + 0.3 * torch.randn(n, 1)) * 0.9, y


torch.manual_seed(21)
G, D = Generator(), Discriminator()
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(D.parameters(), lr=8e-4, betas=(0.0, 0.9))
for step in range(120):
    for _ in range(2):
        real, y = glyphs(64)
        with torch.no_grad():
            fake = G(torch.randn(64, 16), y)
        d_loss = F.relu(1 - D(real, y)).mean() + F.relu(1 + D(fake, y)).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
    y = torch.randint(CLASSES, (64,))
    g_loss = -D(G(torch.randn(64, 16), y), y).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 4 == 0:
        print(f"{step}: D loss {d_loss.item():.3f} G loss {g_loss.item():.3f}")
