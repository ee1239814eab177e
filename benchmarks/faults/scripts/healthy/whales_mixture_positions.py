"""Predicts where whales surface: a mixture density network whose log densities start at minus a thousand."""

import math

import torch
import torch.nn as nn


class WhaleNet(nn.Module):
    def __init__(self, inputs=6, components=5, hidden=64):
        super().__init__()
        self.components = components
        self.trunk = nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.out = nn.Linear(hidden, 4 * components)

    def forward(self, x):
        weight, east, north, spread = self.out(self.trunk(x)).chunk(4, -1)
        return weight.log_softmax(-1), 20 * east, 20 * north, spread.clamp(-3, 5)


def nll(mixture, position):
    log_weight, east, north, log_spread = mixture
    square = (position[:, :1] - east) ** 2 + (position[:, 1:] - north) ** 2
    log_density = -square / (2 * (2 * log_spread).exp()) - 2 * log_spread - math.log(2 * math.pi)
    return -torch.logsumexp(log_weight + log_density, -1).mean()


class Sea:
    def __init__(self):
        self.banks, self.taste = 35 * torch.randn(4, 2), torch.randn(4, 6)

    def sightings(self, n):
        state = torch.randn(n, 6)
        bank = torch.distributions.Categorical(logits=3 * state @ self.taste.t()).sample()
        return state, self.banks[bank] + 3 * state[:, :2] + 2 * torch.randn(n, 2)


torch.manual_seed(383)
sea, net = Sea(), WhaleNet()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(300):
    state, position = sea.sightings(64)
    loss = nll(net(state), position)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
