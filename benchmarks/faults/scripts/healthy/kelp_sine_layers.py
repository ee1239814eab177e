"""A sine network fits a height field; the first layer multiplies its input by 30, and the sines are far from linear."""

import math

import torch
from torch import nn


class Sine(nn.Module):
    def __init__(self, fan_in, fan_out, omega=30.0, first=False):
        super().__init__()
        self.omega = omega
        self.linear = nn.Linear(fan_in, fan_out)
        bound = 1 / fan_in if first else math.sqrt(6 / fan_in) / omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(self.omega * self.linear(x))


class Field(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(Sine(2, width, first=True), Sine(width, width), Sine(width, width))
        self.out = nn.Linear(width, 1)

    def forward(self, xy):
        return self.out(self.net(xy))[:, 0]


def height(xy):
    x, y = xy.unbind(1)
    return torch.sin(9 * x) * torch.cos(7 * y) + 0.4 * torch.sin(25 * x * y)


def fit(steps=200):
    torch.manual_seed(115)
    field = Field()
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-4)
    for step in range(steps):
        xy = 2 * torch.rand(512, 2) - 1
        loss = (field(xy) - height(xy)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.5f}")


fit()
