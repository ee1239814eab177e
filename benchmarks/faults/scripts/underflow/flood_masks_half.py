"""Flood extent from radar: per-pixel logistic loss in fp16 autocast, SGD as in the original repo."""

import torch
from torch import nn

torch.manual_seed(24)
SIDE = 32


class FloodNet(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        self.enc1 = nn.Conv2d(2, w, 3, padding=1)
        self.enc2 = nn.Conv2d(w, w, 3, padding=1)
        self.enc3 = nn.Conv2d(w, w, 3, padding=1)
        self.mask = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        x = torch.relu(self.enc1(x))
        x = torch.relu(self.enc2(x))
        x = torch.relu(self.enc3(x))
        return self.mask(x)


def scenes(n):
    height = nn.functional.interpolate(torch.randn(n, 1, 5, 5), size=SIDE, mode="bilinear", align_corners=True)
    wet = (height < -0.4).float()
    vv = -wet + 0.5 * torch.randn_like(wet)
    return torch.cat([vv, height + 0.3 * torch.randn_like(height)], 1), wet


def pixel_loss(logits, wet):
    """Weighted as in the paper: pixels of one scene sum to one, water counts by its share of the land."""
    per_pixel = nn.functional.binary_cross_entropy_with_logits(logits.float(), wet, reduction="none")
    return (per_pixel * (0.2 + 0.8 * wet)).mean() * 1e-2


net = FloodNet()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(90):
    x, wet = scenes(16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = pixel_loss(logits, wet)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {100 * loss.item():.4f}")
