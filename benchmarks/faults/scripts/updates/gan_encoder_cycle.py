"""Adversarial autoencoder of two-dimensional rings: one optimizer for each part, the latent held to a Gaussian."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(600)


def ring(n):
    a = 6.2832 * torch.rand(n)
    r = 1.5 + 0.1 * torch.randn(n)
    p = torch.stack([r * a.cos(), r * a.sin()], 1)
    lift = torch.stack([p[:, 0], p[:, 1], p[:, 0] * p[:, 1], p[:, 0] ** 2 - p[:, 1] ** 2, p.sum(1), p[:, 0] ** 3], 1)
    return lift


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


encoder, decoder, critic = mlp(6, 48, 2), mlp(2, 48, 6), mlp(2, 32, 1)
opt_enc = torch.optim.Adam(encoder.parameters(), lr=2e-3)
opt_dec = torch.optim.Adam(decoder.parameters(), lr=2e-3)
opt_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
origin = encoder[0].weight.detach().clone()

for step in range(300):
    x = ring(64)
    z = encoder(x)
    rec = F.mse_loss(decoder(z), x)
    adv = F.softplus(-critic(z)).mean()
    opt_dec.zero_grad()
    opt_enc.zero_grad()
    (rec + 0.02 * adv).backward()

    real, fake = critic(torch.randn(64, 2)), critic(z.detach())
    loss_critic = F.softplus(-real).mean() + F.softplus(fake).mean()
    for module in (encoder, critic):
        module.zero_grad(set_to_none=False)
    loss_critic.backward()
    for optimizer in (opt_enc, opt_dec, opt_critic):
        optimizer.step()
    if step % 10 == 9:
        print(f"step {step} rec loss {rec.item():.4f} critic {loss_critic.item():.4f}")
