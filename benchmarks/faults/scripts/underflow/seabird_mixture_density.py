"""Predicts where tagged seabirds are found: a mixture density network over positions in kilometres."""

import torch
import torch.nn as nn


class DriftNet(nn.Module):
    def __init__(self, inputs=5, components=6, hidden=64):
        super().__init__()
        self.components = components
        self.trunk = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.weight, self.centre = nn.Linear(hidden, components), nn.Linear(hidden, 2 * components)
        self.spread = nn.Linear(hidden, components)

    def forward(self, x):
        h = self.trunk(x)
        centre = self.centre(h).view(-1, self.components, 2)
        return torch.softmax(self.weight(h), -1), centre, self.spread(h).exp()


def likelihood(mixture, position):
    weight, centre, spread = mixture
    distance = (position[:, None] - centre).square().sum(-1)
    density = torch.exp(-distance / (2 * spread**2)) / (2 * torch.pi * spread**2)
    return (weight * density).sum(-1)


def nll(mixture, position, eps=1e-20):
    return -(likelihood(mixture, position) + eps).log().mean()


class Colony:
    def __init__(self):
        self.grounds = 40 * torch.randn(4, 2)
        self.taste = torch.randn(4, 5)

    def tracks(self, n):
        weather = torch.randn(n, 5)
        ground = torch.distributions.Categorical(logits=2 * weather @ self.taste.t()).sample()
        wind = torch.stack([weather[:, 0] - weather[:, 1], weather[:, 2]], 1)
        return weather, self.grounds[ground] + 4 * wind + 1.5 * torch.randn(n, 2)


def exact(mixture, position):
    weight, centre, spread = mixture
    distance = (position[:, None] - centre).square().sum(-1)
    return -torch.logsumexp(weight.log() - distance / (2 * spread**2) - (2 * torch.pi * spread**2).log(), -1).mean()


torch.manual_seed(139)
colony, net = Colony(), DriftNet()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(300):
    weather, position = colony.tracks(64)
    mixture = net(weather)
    loss = nll(mixture, position)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
