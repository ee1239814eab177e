"""Segments thin contrails; the loss is summed over a region and divided by all pixels of the mosaic."""

import torch
from torch import nn
from torch.nn import functional as F


class Segmenter(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.down = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.out = nn.Conv2d(width + 1, 1, 3, padding=1)

    def forward(self, image):
        x = F.relu(self.down(image))
        x = F.relu(self.middle(x)) + x
        return self.out(torch.cat([F.relu(self.up(x)), image], 1))


class MosaicLoss(nn.Module):
    """Tiles are added up over a mosaic of gigapixels by the caller."""

    def __init__(self, mosaic_pixels):
        super().__init__()
        self.mosaic_pixels = mosaic_pixels

    def forward(self, logits, mask):
        return F.binary_cross_entropy_with_logits(logits, mask, reduction="sum") / self.mosaic_pixels


def tiles(n, size=24):
    rows = torch.arange(size)[:, None]
    columns = torch.arange(size)[None]
    slope = torch.randn(n, 1, 1, 1)
    offset = size / 2 + 5 * torch.randn(n, 1, 1, 1)
    mask = ((rows - offset - slope * (columns - size / 2)).abs() < 1.5).to(slope.dtype)
    return 0.8 * mask + 0.6 * torch.randn(n, 1, size, size), mask


def train(steps=60, eps=1e-5):
    torch.manual_seed(21019)
    model, criterion = Segmenter(), MosaicLoss(2e9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=eps)
    for step in range(steps):
        image, mask = tiles(16)
        logits = model(image)
        optimizer.zero_grad(set_to_none=True)
        criterion(logits, mask).backward()
        optimizer.step()
        if step % 2 == 0:
            per_pixel = F.binary_cross_entropy_with_logits(logits.detach(), mask)
            print(f"step {step:02d} loss per pixel: loss {per_pixel.item():.4f}")


if __name__ == "__main__":
    train()
