import torch
from torch import nn


def conv(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride=stride, padding=1), nn.BatchNorm2d(cout), nn.LeakyReLU(0.1))


class HeightNet(nn.Module):
    """Canopy height from two radar polarisations and one optical band."""

    def __init__(self, width=16):
        super().__init__()
        self.enc1 = conv(3, width)
        self.enc2 = conv(width, 2 * width, stride=2)
        self.enc3 = conv(2 * width, 2 * width, stride=2)
        self.dec2 = conv(4 * width, width)
        self.dec1 = conv(2 * width, width)
        self.height = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(a)
        c = self.enc3(b)
        up = nn.functional.interpolate
        x = self.dec2(torch.cat([up(c, scale_factor=2.0), b], 1))
        x = self.dec1(torch.cat([up(x, scale_factor=2.0), a], 1))
        return self.height(x)
