"""Mixture density network for inverse kinematics: several joint angles reach the same point."""

import math

import torch
import torch.nn as nn


class MDN(nn.Module):
    def __init__(self, mixtures=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.pi = nn.Linear(32, mixtures)
        self.mu = nn.Linear(32, 2 * mixtures)
        self.sigma = nn.Linear(32, mixtures)

    def forward(self, x):
        h = self.trunk(x)
        return self.pi(h).softmax(-1), self.mu(h).unflatten(-1, (-1, 2)), self.sigma(h).exp()


def mdn_loss(pi, mu, sigma, y):
    z2 = ((y[:, None] - mu) / sigma[..., None]).pow(2).sum(-1)
    density = torch.exp(-0.5 * z2) / (2 * math.pi * sigma**2)
    likelihood = (pi * density).sum(-1)
    return -torch.log(likelihood).mean()


def arm(n):
    angles = torch.rand(n, 2) * 2
    reach = torch.stack([angles[:, 0].cos() + angles.sum(1).cos(), angles[:, 0].sin() + angles.sum(1).sin()], 1)
    wrapped = torch.rand(n) < 0.002  # the encoder counts a full turn too many
    return reach, angles + 4 * math.pi * wrapped[:, None]


if __name__ == "__main__":
    torch.manual_seed(1)
    model = MDN()
    opt = torch.optim.Adam(model.parameters(), lr=3e-2)
    for step in range(30):
        x, y = arm(64)
        loss = mdn_loss(*model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"step {step}: {loss.item():.3f}")
