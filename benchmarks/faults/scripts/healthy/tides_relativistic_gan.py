"""A relativistic GAN that draws tidal curves: both losses swing about log 2."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Generator(nn.Module):
    def __init__(self, latent=8, width=48, length=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(latent, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2), nn.Linear(width, length), nn.Tanh()
        )

    def forward(self, z):
        return 2 * self.net(z)


class Critic(nn.Module):
    def __init__(self, width=48, length=32):
        super().__init__()
        self.fc1 = nn.utils.parametrizations.spectral_norm(nn.Linear(length, width))
        self.fc2 = nn.utils.parametrizations.spectral_norm(nn.Linear(width, 1))

    def forward(self, x):
        return self.fc2(F.leaky_relu(self.fc1(x), 0.2)).squeeze(1)


def curves(n):
    t = torch.linspace(0, 12.56, 32)
    phase = 6.28 * torch.rand(n, 1)
    return torch.sin(t + phase) + 0.4 * torch.sin(2 * t + phase)


def main():
    torch.manual_seed(337)
    generator, critic = Generator(), Critic()
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-4, betas=(0.5, 0.999))
    for step in range(250):
        real, fake = curves(32), generator(torch.randn(32, 8))
        c_loss = F.softplus(-(critic(real) - critic(fake.detach()))).mean()
        c_optimizer.zero_grad()
        c_loss.backward()
        c_optimizer.step()
        g_loss = F.softplus(-(critic(fake) - critic(real))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        if step % 5 == 0:
            print(f"step {step} critic {c_loss.item():.4f} loss {g_loss.item():.4f}")


main()
