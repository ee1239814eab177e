"""WGAN-GP on galaxy magnitudes (g, r, i). n_critic = 3."""

import torch
import torch.nn as nn

torch.manual_seed(14)
Z = 6


def mlp(i, o, w=8):
    return nn.Sequential(nn.Linear(i, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, o))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(Z, 3)

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(3, 1)

    def forward(self, x):
        return self.net(x).squeeze(1)


def survey(n):
    red = (torch.rand(n, 1) < 0.6).float()
    base = red * torch.tensor([19.9, 19.0, 18.6]) + (1 - red) * torch.tensor([20.4, 20.2, 20.1])
    return base + 0.05 * torch.randn(n, 3)


def gradient_penalty(critic, real, fake):
    eps = torch.rand(len(real), 1)
    x = (eps * real + (1 - eps) * fake).requires_grad_()
    (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    slope = torch.sqrt((g**2).sum(1))
    return ((slope - 1) ** 2).mean()


G, D = Generator(), Critic()
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-2, betas=(0.0, 0.9))
for it in range(60):
    for _ in range(3):
        real = survey(64)
        fake = G(torch.randn(64, Z)).detach()
        d_loss = D(fake).mean() - D(real).mean() + 10 * gradient_penalty(D, real, fake)
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
    g_loss = -D(G(torch.randn(64, Z))).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if it % 5 == 0:
        print(f"it {it} critic loss {d_loss.item():.4f} generator loss {g_loss.item():.4f}")
