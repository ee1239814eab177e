import torch
from torch import nn


class DoubleConv(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False),
            nn.GroupNorm(4, cout),
            nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False),
            nn.GroupNorm(4, cout),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, base=8):
        super().__init__()
        self.inc = DoubleConv(1, base)
        self.down = DoubleConv(base, 2 * base)
        self.bottom = DoubleConv(2 * base, 2 * base)
        self.up = DoubleConv(4 * base, base)
        self.last = DoubleConv(2 * base, base)
        self.outc = nn.Conv2d(base, 1, 1)
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, x):
        a = self.inc(x)
        b = self.down(self.pool(a))
        c = self.bottom(self.pool(b))
        x = self.up(torch.cat([self.grow(c), b], 1))
        x = self.last(torch.cat([self.grow(x), a], 1))
        return self.outc(x)
