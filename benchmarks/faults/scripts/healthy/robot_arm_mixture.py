"""A mixture density network for an inverse problem: some components starve, and log-probabilities reach minus hundreds."""

import math

import torch
from torch import nn


class MDN(nn.Module):
    def __init__(self, components=8, width=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.logits, self.mean, self.log_sigma = (nn.Linear(width, components) for _ in range(3))

    def forward(self, x, y):
        h = self.trunk(x)
        log_sigma = self.log_sigma(h).clamp(-4, 2)
        z = (y - self.mean(h)) * torch.exp(-log_sigma)
        log_density = -0.5 * z * z - log_sigma - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(torch.log_softmax(self.logits(h), -1) + log_density, -1)


def reach(n):
    angle = torch.rand(n, 1) * 2 - 1
    return angle + 0.6 * torch.sin(2 * math.pi * angle) + 0.02 * torch.randn(n, 1), angle


torch.manual_seed(119)
net = MDN()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(300):
    x, y = reach(128)
    loss = net(x, y).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    opt.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
