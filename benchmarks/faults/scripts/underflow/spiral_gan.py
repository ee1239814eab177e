"""A GAN on a spiral with the original minimax loss, FP32: the generator minimises log(1 - D(G(z)))."""

import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2)
        )

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
        )

    def forward(self, x):
        return torch.sigmoid(self.net(x)).squeeze(-1)


def spiral(n):
    t = 1 + 2 * torch.rand(n)
    return torch.stack([t * torch.cos(4 * t), t * torch.sin(4 * t)], -1) * 4 + 20


torch.manual_seed(0)
generator, discriminator = Generator(), Discriminator()
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=5e-3, betas=(0.5, 0.999))
for step in range(80):
    real, z = spiral(64), torch.randn(64, 8)
    fake = generator(z)
    d_loss = -(torch.log(discriminator(real) + 1e-12) + torch.log(1 - discriminator(fake.detach()) + 1e-12)).mean()
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()
    g_loss = torch.log(1 - discriminator(generator(z)) + 1e-12).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 2 == 0:
        print(f"step {step}: loss {g_loss.item():.5f} (d {d_loss.item():.5f})")
