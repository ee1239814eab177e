"""Solves u'' = -f with a network. The second derivative is taken by central differences: cheaper than double backward."""

import torch
import torch.nn as nn


class Field(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x):
        return x * (1 - x) * self.net(2 * x - 1)  # zero at both ends


class Laplacian(nn.Module):
    def __init__(self, field, h=1e-4):
        super().__init__()
        self.field, self.h = field, h

    def forward(self, x):
        u = self.field
        return (u(x + self.h) - 2 * u(x) + u(x - self.h)) / self.h**2


def load(x):
    return 4 * torch.sin(torch.pi * x) + 3 * torch.sin(3 * torch.pi * x)


def exact(x):
    return 4 / torch.pi**2 * torch.sin(torch.pi * x) + 3 / (9 * torch.pi**2) * torch.sin(3 * torch.pi * x)


def main():
    torch.manual_seed(7013)
    field = Field()
    laplacian = Laplacian(field)
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
    for it in range(150):
        x = torch.rand(128, 1)
        residual = laplacian(x) + load(x)
        loss = residual.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 10 == 0:
            with torch.no_grad():
                grid = torch.linspace(0, 1, 101).unsqueeze(1)
                error = (field(grid) - exact(grid)).abs().max().item()
            print(f"it {it:3d} loss {loss.item():.5f} largest error {error:.4f}")
    return field, laplacian


field, laplacian = main()
