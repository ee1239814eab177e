"""Four-bit training with learned step sizes: rounding with a straight-through gradient, clipped values without one."""

import torch
from torch import nn


def round_through(x):
    return x + (x.round() - x).detach()


class StepQuantizer(nn.Module):
    def __init__(self, low, high, start):
        super().__init__()
        self.low, self.high = low, high
        self.step = nn.Parameter(torch.tensor(float(start)))

    def forward(self, x):
        g = 1.0 / (x.numel() * self.high) ** 0.5
        s = self.step * g + (self.step - self.step * g).detach()
        return round_through((x / s).clamp(self.low, self.high)) * s


class QuantConv(nn.Conv2d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight_q = StepQuantizer(-8, 7, 2 * self.weight.detach().abs().mean() / 7**0.5)
        self.input_q = StepQuantizer(0, 15, 0.2)

    def forward(self, x):
        return self._conv_forward(self.input_q(x), self.weight_q(self.weight), self.bias)


class Doorbell(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU())
        self.quant1 = QuantConv(12, 24, 3, 2, 1)
        self.bn1 = nn.BatchNorm2d(24)
        self.quant2 = QuantConv(24, 24, 3, 1, 1)
        self.bn2 = nn.BatchNorm2d(24)
        self.last = nn.Linear(24 * 16, classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.quant1(self.first(x))))
        x = torch.relu(self.bn2(self.quant2(x)))
        return self.last(x.flatten(1))


def visitors(n, faces):
    y = torch.randint(5, (n,))
    return faces[y] + 0.8 * torch.randn(n, 1, 16, 16), y


def main():
    torch.manual_seed(118)
    faces = torch.randn(5, 1, 16, 16)
    model = Doorbell()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(100):
        x, y = visitors(32, faces)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
