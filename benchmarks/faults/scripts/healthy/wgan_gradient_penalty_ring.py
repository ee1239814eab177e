"""WGAN-GP on a ring of Gaussians: the critic's loss is negative and wanders, and its scores drift far from zero."""

import torch
import torch.nn as nn

torch.manual_seed(2167)
generator = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))


def ring(n):
    angle = torch.randint(8, (n,)) * 0.7854
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


def penalty(real, fake):
    a = torch.rand(len(real), 1)
    x = (a * real + (1 - a) * fake).requires_grad_()
    (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((g.norm(dim=1) - 1) ** 2).mean()


for step in range(80):
    for _ in range(3):
        real, fake = ring(64), generator(torch.randn(64, 4)).detach()
        d_loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
    g_loss = -critic(generator(torch.randn(64, 4))).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 5 == 0:
        print(f"step {step} critic loss {d_loss.item():.4f}")
