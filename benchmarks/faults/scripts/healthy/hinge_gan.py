"""A hinge GAN with spectral normalisation: both losses swing up and down, as they should."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            spectral_norm(nn.Linear(2, 48)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(48, 48)),
            nn.LeakyReLU(0.2),
            nn.Linear(48, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


def ring(n):
    angle = 6.2832 * torch.randint(8, (n,)) / 8
    return 2 * torch.stack([angle.cos(), angle.sin()], -1) + 0.05 * torch.randn(n, 2)


torch.manual_seed(0)
generator, critic = Generator(), Critic()
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
for step in range(100):
    real, z = ring(64), torch.randn(64, 8)
    c_loss = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(generator(z).detach())).mean()
    opt_c.zero_grad()
    c_loss.backward()
    opt_c.step()
    g_loss = -critic(generator(torch.randn(64, 8))).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 2 == 0:
        print(f"step {step}: loss {c_loss.item():.4f} (g {g_loss.item():.4f})")
