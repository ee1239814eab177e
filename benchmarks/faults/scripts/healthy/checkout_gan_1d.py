"""A GAN for basket values: non-saturating loss, R1 penalty, two optimizers, an average of the generator."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(13)
LATENT, BATCH, STEPS, R1 = 4, 128, 220, 0.1


def baskets(n):
    which = (torch.rand(n, 1) < 0.6).float()
    return which * (1.0 + 0.2 * torch.randn(n, 1)) + (1 - which) * (-1.0 + 0.3 * torch.randn(n, 1))


def mlp(i, o, width=48):
    return nn.Sequential(
        nn.Linear(i, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, o)
    )


generator, critic = mlp(LATENT, 1), mlp(1, 1)
average = copy.deepcopy(generator).requires_grad_(False)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.99))
for step in range(1, STEPS + 1):
    real = baskets(BATCH).requires_grad_()
    fake = generator(torch.randn(BATCH, LATENT)).detach()
    score = critic(real)
    slope = torch.autograd.grad(score.sum(), real, create_graph=True)[0]
    loss_d = F.softplus(-score).mean() + F.softplus(critic(fake)).mean() + R1 / 2 * slope.square().mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()

    loss_g = F.softplus(-critic(generator(torch.randn(BATCH, LATENT)))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    with torch.no_grad():
        for a, p in zip(average.parameters(), generator.parameters()):
            a.lerp_(p, 0.02)
    if step % 20 == 0:
        sample = average(torch.randn(2000, LATENT)).flatten().sort().values
        distance = (sample - baskets(2000).flatten().sort().values).abs().mean().item()
        print(f"step {step} d loss {loss_d.item():.3f} g {loss_g.item():.3f} w1 {distance:.3f}")
