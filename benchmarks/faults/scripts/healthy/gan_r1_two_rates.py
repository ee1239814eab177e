"""A GAN on a ring of Gaussians: two rates, lazy R1 penalty, an average of the generator for samples."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(n_in, n_out, width=48):
    return nn.Sequential(
        nn.Linear(n_in, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, n_out)
    )


def ring(n):
    angle = torch.randint(8, (n,)) * (torch.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


def main(batch=64, every=8, gamma=1.0):
    torch.manual_seed(7039)
    generator, critic = mlp(4, 2), mlp(2, 1)
    average = copy.deepcopy(generator).requires_grad_(False)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.99))
    for it in range(75):
        real = ring(batch)
        fake = generator(torch.randn(batch, 4)).detach()
        d_loss = F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean()
        if it % every == 0:
            real.requires_grad_(True)
            slope = torch.autograd.grad(critic(real).sum(), real, create_graph=True)[0]
            d_loss = d_loss + every * gamma / 2 * slope.square().sum(1).mean()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        critic.requires_grad_(False)
        g_loss = F.softplus(-critic(generator(torch.randn(batch, 4)))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        critic.requires_grad_(True)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), generator.parameters()):
                slow.lerp_(fast, 0.02)
        if it % 5 == 0:
            radius = average(torch.randn(256, 4)).norm(dim=1).mean().item()
            print(f"it {it:3d} d_loss {d_loss.item():.4f} g_loss {g_loss.item():.4f} radius {radius:.3f}")


main()
