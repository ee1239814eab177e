"""Rain from station records: pressure in pascals is standardised in the model by E[x^2] - E[x]^2."""

import torch
from torch import nn


class OnePassNorm(nn.Module):
    """Per window, because stations lie at different heights."""

    def __init__(self, channels, eps=1e-3):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        var = (x * x).mean(1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(var.clamp(min=0) + self.eps) * self.gain + self.shift


class RainNet(nn.Module):
    def __init__(self, channels=3, width=32):
        super().__init__()
        self.norm = OnePassNorm(channels)
        self.conv1 = nn.Conv1d(channels, width, 5, padding=2)
        self.conv2 = nn.Conv1d(width, width, 5, padding=2)
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        x = self.norm(x).transpose(1, 2)
        x = torch.relu(self.conv1(x))
        return self.out(torch.relu(self.conv2(x)).mean(-1))


def windows(n, hours=36):
    trend = torch.randint(3, (n,))
    t = torch.linspace(-1, 1, hours)
    pressure = 101325 - 11.5 * 800 * torch.rand(n, 1)
    pressure = pressure + 12.0 * (trend.view(n, 1) - 1) * t + 4.0 * torch.randn(n, hours)
    temperature = 288 + 3 * torch.sin(3.14 * t) + torch.randn(n, hours)
    humidity = 0.7 + 0.1 * torch.randn(n, hours)
    return torch.stack([pressure, temperature, humidity], -1), trend


if __name__ == "__main__":
    torch.manual_seed(18)
    net = RainNet()
    optim = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(160):
        x, y = windows(32)
        loss = nn.functional.cross_entropy(net(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
