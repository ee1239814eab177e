"""Density estimation by an autoregressive mixture; components are switched off by weights of -inf, in log space."""

import math

import torch
from torch import nn


class AutoregressiveMixture(nn.Module):
    def __init__(self, dims=4, components=5, hidden=48):
        super().__init__()
        self.dims, self.components = dims, components
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(i + 1, hidden), nn.Tanh(), nn.Linear(hidden, 3 * components)) for i in range(dims)
        )
        allowed = torch.arange(components) < torch.tensor([[2], [3], [4], [5]])
        self.register_buffer("forbidden", torch.zeros(dims, components).masked_fill(~allowed, -math.inf))

    def forward(self, x):
        log_p = 0.0
        padded = torch.cat([torch.ones(len(x), 1), x], 1)
        for i, net in enumerate(self.nets):
            weight, mean, log_sd = net(padded[:, : i + 1]).chunk(3, -1)
            log_w = torch.log_softmax(weight + self.forbidden[i], -1)
            z = (x[:, i : i + 1] - mean) * torch.exp(-log_sd)
            log_p = log_p + torch.logsumexp(log_w - 0.5 * z.square() - log_sd, -1)
        return log_p - 0.5 * self.dims * math.log(2 * math.pi)


def sample(n):
    sign = torch.randint(0, 2, (n, 1)) * 2.0 - 1
    a = sign * 2 + 0.3 * torch.randn(n, 1)
    rest = torch.sin(a) + 0.2 * torch.randn(n, 3).cumsum(1)
    return torch.cat([a, rest], 1)


torch.manual_seed(71)
model = AutoregressiveMixture()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
best = math.inf
for step in range(40):
    loss = -model(sample(128)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    best = min(best, loss.item())
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.3f} best {best:.3f}")
