import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.c1 = nn.Conv2d(3, width, 3, padding=1)
        self.c2 = nn.Conv2d(width, 4, 3, padding=1, stride=2)

    def forward(self, x):
        return F.relu(self.c2(F.relu(self.c1(x))))


class WeedNet(nn.Module):
    """Two-level encoder and a decoder that upsamples once."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 12, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(12, 1, 3, padding=1)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x)).squeeze(1)


def fields(n, dry, generator):
    """Plots of 12x12: weeds are spots that differ from the crop in colour; in dry months also from the soil."""
    spots = F.interpolate(torch.rand(n, 1, 6, 6, generator=generator), 12).squeeze(1) > 0.7
    rows = (torch.arange(12) % 4 < 2).float().expand(n, 12, 12)
    green = 0.5 * rows + spots.float() * (0.3 if not dry else -0.2)
    red = 0.2 * torch.randn(n, 12, 12, generator=generator) + (0.0 if not dry else 0.8 * rows)
    blue = spots.float() * (0.6 if not dry else 0.0) + (0.9 * rows * (1 - spots.float()) if dry else 0)
    x = torch.stack([red, green, blue], 1) + 0.15 * torch.randn(n, 3, 12, 12, generator=generator)
    return x, spots.float()
