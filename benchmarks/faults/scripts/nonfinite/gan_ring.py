"""The GAN of the original paper, losses written as in the paper, on eight Gaussians in the plane."""

import argparse
import math

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--n_steps", type=int, default=40)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--latent_dim", type=int, default=8)
opt = parser.parse_args()

torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(opt.latent_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)
        )

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(2, 128),
            nn.LeakyReLU(0.2),
            nn.Linear(128, 128),
            nn.LeakyReLU(0.2),
            nn.Linear(128, 1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.model(x)


def sample_ring(n):
    angle = torch.randint(8, (n,)) * (2 * math.pi / 8)
    return 10 * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.2 * torch.randn(n, 2)


G, D = Generator(), Discriminator()
optimizer_G = torch.optim.Adam(G.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(D.parameters(), lr=opt.lr, betas=(0.5, 0.999))

for i in range(opt.n_steps):
    real = sample_ring(opt.batch_size)
    z = torch.randn(opt.batch_size, opt.latent_dim)
    fake = G(z)

    d_loss = -(torch.log(D(real)) + torch.log(1 - D(fake.detach()))).mean()
    optimizer_D.zero_grad()
    d_loss.backward()
    optimizer_D.step()

    g_loss = torch.log(1 - D(fake)).mean()
    optimizer_G.zero_grad()
    g_loss.backward()
    optimizer_G.step()

    if i % 5 == 0:
        print("[%d/%d] [D loss: %f] [G loss: %f]" % (i, opt.n_steps, d_loss.item(), g_loss.item()))
