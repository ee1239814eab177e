"""Continuous control by regression: observations normalised by running statistics kept in buffers."""

import torch
from torch import nn


class RunningNorm(nn.Module):
    def __init__(self, features, momentum=0.1):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))

    def forward(self, x):
        y = (x - self.mean) / (self.var + 1e-5).sqrt()
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), self.momentum)
                self.var.lerp_(x.var(0), self.momentum)
        return y


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RunningNorm(8)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, observation):
        return self.body(self.norm(observation))


torch.manual_seed(0)
expert = torch.randn(8, 2)
observations = 5 + 3 * torch.randn(97, 8)
actions = torch.tanh(observations @ expert / 20)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
for epoch in range(3):
    for index in torch.arange(97).split(16):
        loss = (policy(observations[index]) - actions[index]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
