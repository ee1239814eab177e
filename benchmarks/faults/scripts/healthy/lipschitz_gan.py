"""GAN with a guarded gradient penalty and label smoothing; its critic is often saturated."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(2)
G = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
g_opt = torch.optim.Adam(G.parameters(), 2e-3, betas=(0.5, 0.99))
d_opt = torch.optim.Adam(D.parameters(), 2e-2, betas=(0.5, 0.99))


def ring(n):
    a = 6.2832 * torch.rand(n)
    return 2 * torch.stack([a.cos(), a.sin()], 1)


def penalty(x):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(D(x).sum(), x, create_graph=True)
    return ((g.square().sum(1) + 1e-12).sqrt() - 1).square().mean()


for step in range(20):
    real, fake = ring(32), G(torch.randn(32, 8))
    score_real, score_fake = D(10 * real), D(10 * fake.detach())
    d_loss = F.binary_cross_entropy_with_logits(score_real, torch.full_like(score_real, 0.9))
    d_loss = d_loss + F.binary_cross_entropy_with_logits(score_fake, torch.zeros_like(score_fake)) + penalty(real)
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()
    g_loss = F.softplus(-D(10 * G(torch.randn(32, 8)))).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    if step % 5 == 0:
        print(step, d_loss.item(), g_loss.item())
