"""WaveNet-like dilated causal convolutions; learning rate by a hand-made warm-up and decay schedule."""

import torch
from torch import nn
from torch.nn import functional as F

LEVELS = 32


class GatedLayer(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.dilation = dilation
        self.filter_gate = nn.Conv1d(channels, 2 * channels, 2, dilation=dilation)
        self.residual = nn.Conv1d(channels, channels, 1)
        self.skip = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        f, g = self.filter_gate(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        z = torch.tanh(f) * torch.sigmoid(g)
        return x + self.residual(z), self.skip(z)


class WaveNet(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.input = nn.Embedding(LEVELS, channels)
        self.layers = nn.ModuleList(GatedLayer(channels, 2**i) for i in range(5))
        self.output = nn.Sequential(nn.ReLU(), nn.Conv1d(channels, LEVELS, 1))

    def forward(self, x):
        x = self.input(x).transpose(1, 2)
        total = 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.output(total)


def tones(n, length=64):
    t = torch.arange(length + 1) / 8
    wave = torch.sin(t * (1 + torch.rand(n, 1)) + 6.28 * torch.rand(n, 1))
    return ((wave + 1) / 2 * (LEVELS - 1)).round().long()


def learning_rate(step, warmup=6, total=14):
    if step < warmup:
        return (step + 1) / warmup
    remaining = max((total - step) / (total - warmup), 1e-20)
    return 1.0 / remaining**2.1


torch.manual_seed(6)
net = WaveNet()
optimizer = torch.optim.SGD(net.parameters(), lr=2e-4, momentum=0.9)
for step in range(16):
    for group in optimizer.param_groups:
        group["lr"] = 2e-4 * learning_rate(step)
    sound = tones(8)
    loss = F.cross_entropy(net(sound[:, :-1]), sound[:, 1:], reduction="sum") / len(sound)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step:2d}  lr {optimizer.param_groups[0]['lr']:.3g}  loss {loss.item():.4f}")
