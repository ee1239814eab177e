"""Remaining life of bilge pumps from eight sensors. The width in front of the head is an argument of each run."""

import torch
from torch import nn
import torch.nn.functional as F


class PumpNet(nn.Module):
    def __init__(self, sensors, d=40):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(sensors, d), nn.Tanh())
        self.trunk = nn.Sequential()
        for i in range(3):
            self.trunk.append(nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d)))
        self.fuse = nn.Sequential(nn.Linear(d, 16), nn.SiLU())
        self.life = nn.Linear(16, 1)

    def forward(self, x):
        h = self.stem(x)
        for block in self.trunk:
            h = h + block(h)
        return self.life(self.fuse(h)).squeeze(1)

    def widen(self, width):
        """A wider bottleneck in front of the head."""
        old = self.fuse[0]
        self.fuse[0] = nn.Linear(old.in_features, width)
        nn.init.normal_(self.fuse[0].weight, std=0.02)
        self.life = nn.Linear(width, 1) if width != old.out_features else self.life


class Fitter:
    def __init__(self, net, lr):
        self.net = net
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)
        self.history = []

    def run(self, source, steps, fuse_width=None):
        if fuse_width:
            self.net.widen(fuse_width)
        for step in range(steps):
            x, y = source(64)
            loss = F.mse_loss(self.net(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], 5.0)
            self.optimizer.step()
            self.history.append(loss.item())
            if step % 10 == 9:
                print(f"step {step + 1} loss {sum(self.history[-10:]) / 10:.4f}")


def pumps(n):
    x = torch.randn(n, 8)
    return x, x[:, 0] * x[:, 1] + torch.relu(x[:, 2]) - 1.5 * torch.cos(2 * x[:, 3])


torch.manual_seed(40)
net = PumpNet(8)
fitter = Fitter(net, lr=2e-3)
fitter.run(pumps, steps=250, fuse_width=16)
