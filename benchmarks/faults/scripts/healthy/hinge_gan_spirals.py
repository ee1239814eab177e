"""A hinge GAN with spectral norms: when the critic is sure, its hinge is flat and gives no gradient."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(550)


def spiral(n):
    a = 6 * torch.rand(n)
    return torch.stack([a.cos() * a / 4, a.sin() * a / 4], 1) + 0.03 * torch.randn(n, 2)


gen = nn.Sequential(nn.Linear(4, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2))
critic = nn.Sequential(
    *(spectral_norm(nn.Linear(2, 48)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(48, 48)), nn.LeakyReLU(0.2)),
    spectral_norm(nn.Linear(48, 1)),
)
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
for step in range(120):
    for _ in range(2):
        fake = gen(torch.randn(64, 4)).detach()
        d_loss = F.relu(1 - critic(spiral(64))).mean() + F.relu(1 + critic(fake)).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
    g_loss = -critic(gen(torch.randn(64, 4))).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 4 == 0:
        print(f"step {step} d_loss {d_loss.item():.4f} g {g_loss.item():.4f}")
