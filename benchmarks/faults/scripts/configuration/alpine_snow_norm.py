"""Snow depth along ski routes from a sliding weather window and the terrain profile."""

import torch
from torch import nn


class ProfileNorm(nn.Module):
    """Normalises each channel over the positions of one route, in a single pass over the data."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1))
        self.eps = eps

    def moments(self, x):
        mean = x.mean(-1, keepdim=True)
        return mean, ((x * x).mean(-1, keepdim=True) - mean * mean).clamp(min=0)

    def forward(self, x):
        mean, var = self.moments(x)
        return (x - mean) / torch.sqrt(var + self.eps) * self.weight + self.bias


class Stage(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.conv = nn.Conv1d(a, b, 3, padding=1)
        self.norm = ProfileNorm(b)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class Terrain(nn.Module):
    def __init__(self, b):
        super().__init__()
        self.norm = ProfileNorm(1)
        self.lift = nn.Conv1d(1, b, 3, padding=1)

    def forward(self, elevation):
        return self.lift(self.norm(elevation))


class SnowNet(nn.Module):
    def __init__(self, c=20):
        super().__init__()
        self.stages = nn.ModuleList([Stage(5, c), Stage(c, c), Stage(c, c), Stage(c, c)])
        self.terrain = Terrain(c)
        self.merge = Stage(c, c)
        self.out = nn.Conv1d(c, 1, 1)

    def forward(self, weather, elevation):
        x = weather
        for stage in self.stages:
            x = stage(x)
        return self.out(self.merge(x + self.terrain(elevation)))


def routes(n, length=40):
    # elevation in millimetres above sea level, as the survey delivers it; the routes are plateaus
    base = 1_800_000 + 900_000 * torch.rand(n, 1, 1)
    bumps = torch.randn(n, 1, length).cumsum(-1) * 12
    elevation = (base + bumps).round()
    weather = torch.randn(n, 5, length)
    shape = (bumps - bumps.mean(-1, keepdim=True)) / bumps.std(-1, keepdim=True)
    depth = torch.tanh(weather[:, :1]) - 0.8 * shape + 0.1 * torch.randn(n, 1, length)
    return weather, elevation, depth


def main():
    torch.manual_seed(1)
    net = SnowNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 6e-3, total_steps=160)
    for step in range(160):
        weather, elevation, depth = routes(24)
        loss = nn.functional.huber_loss(net(weather, elevation), depth)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 8 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")
    return net


if __name__ == "__main__":
    net = main()
