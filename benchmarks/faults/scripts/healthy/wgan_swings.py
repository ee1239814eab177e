"""A Wasserstein GAN with a gradient penalty on a ring: the critic's loss changes its sign, and says little."""

import torch
from torch import nn


def mlp(a, b):
    return nn.Sequential(nn.Linear(a, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, b))


def ring(n):
    a = 6.2832 * torch.rand(n, 1)
    return torch.cat([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2)


def penalty(critic, real, fake):
    mix = torch.rand(len(real), 1)
    x = (mix * real + (1 - mix) * fake).requires_grad_()
    (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (g.norm(dim=1) - 1).square().mean()


torch.manual_seed(3221)
generator, critic = mlp(4, 2), mlp(2, 1)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
c_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
for step in range(40):
    for _ in range(2):
        real, fake = ring(64), generator(torch.randn(64, 4)).detach()
        c_loss = critic(fake).mean() - critic(real).mean() + 5 * penalty(critic, real, fake)
        c_optimizer.zero_grad()
        c_loss.backward()
        c_optimizer.step()
    g_loss = -critic(generator(torch.randn(64, 4))).mean()
    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()
    if step % 4 == 0:
        print(f"step {step} critic loss {c_loss.item():.4f}")
