"""EEGNet-like classifier; the recordings come from the reader in volts, some ten microvolts large."""

import torch
import torch.nn as nn
import torch.nn.functional as F

UNIT = 1.0  # volts, as the reader returns them
CHANNELS, SAMPLES = 8, 128


class EEGNet(nn.Module):
    def __init__(self, classes=3, f1=8, depth=2):
        super().__init__()
        self.temporal = nn.Conv2d(1, f1, (1, 17), padding=(0, 8), bias=False)
        self.bn1 = nn.BatchNorm2d(f1, momentum=0.01, eps=1e-3)
        self.spatial = nn.Conv2d(f1, f1 * depth, (CHANNELS, 1), groups=f1, bias=False)
        self.bn2 = nn.BatchNorm2d(f1 * depth, momentum=0.01, eps=1e-3)
        self.pool = nn.AvgPool2d((1, 8))
        self.classify = nn.Linear(f1 * depth * SAMPLES // 8, classes)

    def forward(self, x):
        x = self.bn1(self.temporal(x.unsqueeze(1)))
        x = F.elu(self.bn2(self.spatial(x)))
        return self.classify(self.pool(x.square()).flatten(1))


def epochs(n, freqs=(6.0, 10.0, 20.0)):
    y = torch.randint(3, (n,))
    t = torch.arange(SAMPLES) / 128.0
    wave = torch.sin(6.28 * torch.tensor(freqs)[y].view(-1, 1, 1) * t + 6.28 * torch.rand(n, 1, 1))
    mixing = torch.linspace(0.2, 1.0, CHANNELS).view(1, -1, 1)
    microvolts = 12.0 * mixing * wave + 10.0 * torch.randn(n, CHANNELS, SAMPLES)
    return microvolts * 1e-6, y


torch.manual_seed(2117)
net = EEGNet()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(100):
    x, y = epochs(32)
    loss = F.cross_entropy(net(x * UNIT), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
