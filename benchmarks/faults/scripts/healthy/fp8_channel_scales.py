"""E4M3 weights and activations with a scale per channel or row; features differ by five orders of magnitude."""

import torch
from torch import nn

E4M3 = torch.float8_e4m3fn


def rounded(x, dim):
    """x on the E4M3 grid, with one scale along ``dim``; gradients pass."""
    largest = torch.finfo(E4M3).max
    with torch.no_grad():
        scale = largest / x.abs().amax(dim, keepdim=True).clamp(min=1e-20)
        grid = (x * scale).clamp(-largest, largest).to(E4M3).to(x.dtype) / scale
    return x + (grid - x).detach()


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(rounded(x, -1), rounded(self.weight, -1), self.bias)


class Standardise(nn.Module):
    """Scales that were measured once, on the first batch."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))

    def measure(self, x):
        self.mean.copy_(x.mean(0))
        self.std.copy_(x.std(0))

    def forward(self, x):
        return (x - self.mean) / self.std


class Lab(nn.Module):
    def __init__(self, features=14):
        super().__init__()
        self.standardise = Standardise(features)
        self.fc1, self.fc2, self.out = Fp8Linear(features, 64), Fp8Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        x = torch.relu(self.fc1(self.standardise(x)))
        return self.out(torch.relu(self.fc2(x)))


def blood_values(n, direction):
    units = torch.logspace(-3, 2, 14)
    z = torch.randn(n, 14)
    return units * (3.0 + z), (z @ direction).argmax(1)


def main():
    torch.manual_seed(21110)
    direction = torch.randn(14, 3)
    model = Lab()
    model.standardise.measure(blood_values(500, direction)[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(70):
        x, label = blood_values(96, direction)
        loss = nn.functional.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
