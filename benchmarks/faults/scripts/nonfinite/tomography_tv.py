"""Few-view tomography: an image is fitted to its projections under total variation; attenuation is never negative."""

import torch
from torch import nn


class Slice(nn.Module):
    """The attenuation map, and its sums along straight lines."""

    def __init__(self, size=24, angles=10):
        super().__init__()
        self.mu = nn.Parameter(0.3 + 0.02 * torch.randn(size, size))
        c = torch.linspace(-1, 1, size)
        yy, xx = torch.meshgrid(c, c, indexing="ij")
        rows = []
        for a in torch.arange(angles) * torch.pi / angles:
            position = (xx * a.cos() + yy * a.sin() + 1.45) / 2.9 * (size - 1)
            bins = position.round().long().flatten()
            rows.append(torch.zeros(size, size * size).scatter_(0, bins[None], 1.0))
        self.register_buffer("rays", torch.cat(rows))

    def forward(self, image=None):
        image = self.mu if image is None else image
        return self.rays @ image.flatten()


def total_variation(img):
    dy = img[1:, :-1] - img[:-1, :-1]
    dx = img[:-1, 1:] - img[:-1, :-1]
    return torch.hypot(dx, dy).sum()


def phantom(size=24):
    c = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(c, c, indexing="ij")
    img = torch.zeros(size, size)
    img[xx**2 / 0.5 + yy**2 / 0.7 < 1] = 0.8
    img[(xx - 0.2) ** 2 + (yy + 0.1) ** 2 < 0.06] = 0.3
    return img


torch.manual_seed(19)
model = Slice()
with torch.no_grad():
    measured = model(phantom())
    measured += 0.05 * torch.randn_like(measured)
optimizer = torch.optim.Adam(model.parameters(), lr=0.04)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
for it in range(40):
    residual = model() - measured
    loss = residual.square().mean() + 2e-3 * total_variation(model.mu)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    with torch.no_grad():
        model.mu.clamp_(min=0)
    if it % 8 == 0:
        print(f"it {it} loss {loss.item():.4f}")
