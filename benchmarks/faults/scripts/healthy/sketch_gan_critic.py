"""Wasserstein GAN with gradient penalty on strokes: five critic steps for one of the generator, which starts later."""

import torch
import torch.nn as nn

torch.manual_seed(13)
POINTS = 8


def strokes(n):
    t = torch.linspace(0, 1, POINTS)
    bend, turn = torch.randn(n, 1), torch.rand(n, 1) * 6.28
    x, y = t - 0.5, bend * (t - 0.5) ** 2
    return torch.cat([x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()], 1)


generator = nn.Sequential(
    nn.Linear(6, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2 * POINTS)
)
critic = nn.Sequential(
    nn.Linear(2 * POINTS, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
)
g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
d_opt = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))

CRITIC_ALONE, N_CRITIC = 60, 5
for step in range(500):
    real, fake = strokes(48), generator(torch.randn(48, 6)).detach()
    mix = torch.lerp(real, fake, torch.rand(48, 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    d_loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()
    if step >= CRITIC_ALONE and step % N_CRITIC == 0:
        g_loss = -critic(generator(torch.randn(48, 6))).mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
    if step % 10 == 0:
        print(f"step {step} penalty {penalty.item():.3f} critic loss {d_loss.item():.4f}")
