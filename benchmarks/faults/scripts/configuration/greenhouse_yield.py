"""Forecasts the yield of greenhouses from raw climate curves with a small convolutional network."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class OnePassNorm(nn.Module):
    """Normalises each channel of each example over time; both moments come from one pass over the data."""

    def __init__(self, channels, eps=1e-3):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels, 1)), nn.Parameter(torch.zeros(channels, 1))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        square = (x * x).mean(-1, keepdim=True)
        var = (square - mean * mean).clamp(min=0)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight.to(x.dtype) + self.bias.to(x.dtype)


class YieldNet(nn.Module):
    def __init__(self, channels=6, width=32):
        super().__init__()
        self.norm = OnePassNorm(channels)
        self.conv1, self.conv2 = nn.Conv1d(channels, width, 5, padding=2), nn.Conv1d(width, width, 5, padding=2)
        self.out = nn.Linear(width, 1)

    def forward(self, climate):
        x = self.norm(climate)
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.out(x.mean(-1)).squeeze(-1)


class Houses:
    def __init__(self, channels=6):
        self.level = torch.tensor([22.0, 65.0, 410.0, 18.0, 101.0, 6.5])[:channels, None]
        self.weight = torch.randn(channels)

    def season(self, n, days=48):
        t = torch.linspace(0, 6.28, days)
        amount = torch.rand(n, len(self.level), 1)
        speed = torch.randint(1, 4, (n, len(self.level), 1))
        swing = amount * torch.sin(speed * t) + 0.3 * torch.randn(n, len(self.level), days)
        crop = (self.weight * (speed.squeeze(-1) - 2.0)).sum(1)
        return self.level * (1 + 0.02 * swing), crop


def main():
    torch.manual_seed(197)
    houses, net = Houses(), YieldNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(200):
        climate, crop = houses.season(32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = net(climate.to(torch.bfloat16))
        loss = F.mse_loss(predicted.float(), crop)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
