"""WGAN-GP on a ring of eight Gaussians; the critic's loss wanders, gradients of the penalty are large."""

import torch
from torch import nn

torch.manual_seed(608)


def net(d_in, d_out, width=48):
    return nn.Sequential(
        nn.Linear(d_in, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, d_out)
    )


generator, critic = net(4, 2), net(2, 1)
g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
c_opt = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))


def coins(n):
    angle = torch.randint(8, (n,)) * 0.7853981
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.05 * torch.randn(n, 2)


for step in range(150):
    for _ in range(3):
        real, fake = coins(64), generator(torch.randn(64, 4)).detach()
        between = (real + torch.rand(64, 1) * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        c_loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        c_opt.zero_grad()
        c_loss.backward()
        c_opt.step()
    g_loss = -critic(generator(torch.randn(64, 4))).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    if step % 10 == 9:
        print(
            f"step {step + 1} critic loss {c_loss.item():.3f} generator {g_loss.item():.3f} penalty {penalty.item():.3f}"
        )
