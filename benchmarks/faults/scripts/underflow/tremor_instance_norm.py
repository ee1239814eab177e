"""Volcanic tremor or quarry blast? A small 1-D CNN on ground velocity in metres per second, normalised per trace."""

import math

import torch
import torch.nn.functional as F
from torch import nn

NORM_EPS = 1e-5
SAMPLES = 128


class TremorNet(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.trace_norm = nn.InstanceNorm1d(3, eps=NORM_EPS)
        self.conv1 = nn.Conv1d(3, channels, 9, stride=2, padding=4)
        self.conv2 = nn.Conv1d(channels, channels, 9, stride=2, padding=4)
        self.classify = nn.Linear(channels, 2)

    def forward(self, velocity):
        x = self.trace_norm(velocity)
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.classify(x.mean(-1))


def record(n):
    """Three components; tremor is harmonic, blasts are short and broad."""
    t = torch.arange(SAMPLES) / SAMPLES
    is_tremor = torch.rand(n) < 0.5
    pitch = 6 + 6 * torch.rand(n, 1, 1)
    phase = 2 * math.pi * torch.rand(n, 3, 1)
    tremor = torch.sin(2 * math.pi * pitch * t + phase)
    onset = 0.2 + 0.4 * torch.rand(n, 1, 1)
    blast = 2 * torch.randn(n, 3, SAMPLES) * torch.exp(-12 * (t - onset).clamp(min=0)) * (t > onset)
    wave = torch.where(is_tremor[:, None, None], tremor, blast) + 0.6 * torch.randn(n, 3, SAMPLES)
    return 4e-4 * wave, is_tremor.long()


torch.manual_seed(77)
net = TremorNet()
opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
for step in range(100):
    velocity, label = record(32)
    loss = F.cross_entropy(net(velocity), label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print("step", step + 1, "loss", round(loss.item(), 4))
