import torch
import torch.nn as nn


def double_conv(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enc1 = double_conv(1, width)
        self.enc2 = double_conv(width, 2 * width)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.dec1 = double_conv(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(self.pool(a))
        return self.out(self.dec1(torch.cat([self.up(b), a], 1)))
