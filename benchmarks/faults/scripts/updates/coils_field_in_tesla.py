"""The field of a pair of coils from their currents, in tesla: some ten microtesla, and their squared errors."""

import math

import torch
from torch import nn

MU0 = 4e-7 * math.pi


class FieldNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.axial = nn.Linear(width, 1)
        self.unit = MU0 / (2 * 0.1)  # the field of one ampere in one turn

    def forward(self, setting):
        return self.unit * self.axial(self.body(setting)).squeeze(-1)


def measure(n):
    """Currents in amperes, positions in units of the radius."""
    i1, i2 = 2 * torch.randn(2, n)
    x, gap, radius = torch.rand(n) - 0.5, 0.5 + torch.rand(n), 0.8 + 0.4 * torch.rand(n)
    field = MU0 / 0.2 * sum(i * radius**2 / (radius**2 + (x + s * gap / 2) ** 2) ** 1.5 for i, s in ((i1, 1), (i2, -1)))
    return torch.stack([i1, i2, x, gap, radius], 1), field


def main():
    torch.manual_seed(3)
    net = FieldNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(300):
        setting, field = measure(128)
        error = net(setting) - field
        loss = error.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 14:
            print(f"step {step + 1} loss {1e12 * loss.item():.3f} uT^2")


if __name__ == "__main__":
    main()
