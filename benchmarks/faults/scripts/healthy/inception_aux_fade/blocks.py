import torch
import torch.nn as nn
import torch.nn.functional as F


class Mixed(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a = nn.Conv2d(i, o, 1)
        self.b = nn.Conv2d(i, o, 3, padding=1)

    def forward(self, x):
        return F.relu(torch.cat([self.a(x), self.b(x)], 1))


class SmallInception(nn.Module):
    """Two mixed blocks; an auxiliary classifier sits on the first."""

    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.mixed1 = Mixed(8, 8)
        self.mixed2 = Mixed(16, 12)
        self.aux = nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, classes))
        self.fc = nn.Linear(24 * 9, classes)

    def forward(self, x):
        h = self.mixed1(F.relu(self.stem(x)))
        aux = self.aux(h)
        return self.fc(F.adaptive_avg_pool2d(self.mixed2(h), 3).flatten(1)), aux
