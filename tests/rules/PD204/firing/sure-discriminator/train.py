"""A discriminator that soon tells everything apart, and a generator that minimises log(1 - D): nothing comes back."""

import torch
from torch import nn


def player(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 12), nn.LeakyReLU(0.2), nn.Linear(12, outputs))


torch.manual_seed(0)
generator, discriminator = player(4, 3), player(3, 1)
learn = torch.optim.Adam(generator.parameters(), lr=1e-4)
judge = torch.optim.Adam(discriminator.parameters(), lr=6e-2)
for step in range(28):
    real, noise = 5.0 + torch.randn(32, 3), torch.randn(32, 4)
    told = torch.sigmoid(discriminator(real)), torch.sigmoid(discriminator(generator(noise).detach()))
    loss = -(told[0].log() + (1 - told[1]).log()).mean()
    judge.zero_grad()
    loss.backward()
    judge.step()
    fooled = (1 - torch.sigmoid(discriminator(generator(noise)))).log().mean()
    learn.zero_grad()
    fooled.backward()
    learn.step()
    print(f"step {step}: discriminator {loss.item():.4f} generator {fooled.item():.4f}")
