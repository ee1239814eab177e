"""Fits an image with coordinates; frequency bands are opened one after the other, as in BARF."""

import math

import torch
from torch import nn


class CoarseToFine(nn.Module):
    def __init__(self, bands=7, open_after=300):
        super().__init__()
        self.bands, self.open_after = bands, open_after
        self.register_buffer("steps_done", torch.zeros(()))
        self.register_buffer("frequency", 2.0 ** torch.arange(bands) * math.pi)

    def forward(self, xy):
        if self.training:
            self.steps_done += 1
        alpha = self.steps_done / self.open_after * self.bands
        weight = (1 - torch.cos((alpha - torch.arange(self.bands)).clamp(0, 1) * math.pi)) / 2
        angle = xy.unsqueeze(-1) * self.frequency
        features = torch.cat([angle.sin() * weight, angle.cos() * weight], -1)
        return torch.cat([xy, features.flatten(1)], 1)


class ImageField(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoding = CoarseToFine().to(torch.bfloat16)
        self.mlp = nn.Sequential(nn.Linear(2 + 4 * 7, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, xy):
        return self.mlp(self.encoding(xy).float())


def image(xy):
    return torch.sin(30 * xy[:, :1]) * torch.cos(26 * xy[:, 1:]) + 0.6 * torch.sin(201 * xy[:, :1])


if __name__ == "__main__":
    torch.manual_seed(5)
    field = ImageField()
    optimizer = torch.optim.Adam(field.parameters(), lr=3e-3)
    for it in range(520):
        xy = torch.rand(256, 2) * 2 - 1
        loss = (field(xy) - image(xy)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 20 == 0:
            psnr = -10 * math.log10(loss.item())
            print(f"it {it}: loss {loss.item():.5f} psnr {psnr:.2f}")
