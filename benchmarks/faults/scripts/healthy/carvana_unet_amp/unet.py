"""A two-level UNet."""

import torch
from torch import nn


class DoubleConv(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(
            nn.Conv2d(a, b, 3, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, channels=3, classes=1, c=6):
        super().__init__()
        self.inc, self.down = DoubleConv(channels, c), DoubleConv(c, 2 * c)
        self.pool, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.conv, self.outc = DoubleConv(2 * c, c), nn.Conv2d(c, classes, 1)

    def forward(self, x):
        top = self.inc(x)
        low = self.down(self.pool(top))
        return self.outc(self.conv(torch.cat([top, self.up(low)], 1)))
