"""DANN with a gradient-reversal layer whose strength starts at 0, and auxiliary heads with weights of 1e-3."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class AdaptedNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.label = nn.Linear(32, classes)
        self.domain = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.rotation, self.energy = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x, strength):
        h = self.features(x)
        return self.label(h), self.domain(Reverse.apply(h, strength)), self.rotation(h), self.energy(h).squeeze(-1)


def batch(n, centres, shift):
    y = torch.randint(5, (n,))
    x = centres[y] + 0.6 * torch.randn(n, 24)
    rotation = torch.randint(4, (n,))
    x = torch.where((rotation % 2 == 1).unsqueeze(1), x.flip(1) * 0.1 + x, x)
    return x + shift, y, rotation


def main(steps=90):
    torch.manual_seed(7035)
    centres, shift = torch.randn(5, 24), 0.5 * torch.randn(24)
    model = AdaptedNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for step in range(steps):
        strength = 2 / (1 + math.exp(-10 * step / steps)) - 1
        xs, ys, rs = batch(48, centres, 0.0)
        xt, _, rt = batch(48, centres, shift)
        x = torch.cat([xs, xt])
        label, domain, rotation, energy = model(x, 0.3 * strength)
        classify = F.cross_entropy(label[:48], ys)
        confuse = F.cross_entropy(domain, torch.arange(2).repeat_interleave(48))
        auxiliary = F.cross_entropy(rotation, torch.cat([rs, rt])) + F.mse_loss(energy, x.square().mean(1))
        total = classify + confuse + 1e-3 * auxiliary
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if step % 5 == 0:
            print(
                f"step {step:3d} label loss {classify.item():.4f} domain {confuse.item():.4f} aux {auxiliary.item():.4f}"
            )


main()
