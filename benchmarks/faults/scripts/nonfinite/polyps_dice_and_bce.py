"""Segments polyps with BCE + Dice under autocast."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class DiceLoss(nn.Module):
    def __init__(self, smooth=1.0):
        super().__init__()
        self.smooth = smooth

    def forward(self, logits, target):
        p = torch.sigmoid(logits).flatten()
        t = target.to(p.dtype).flatten()
        intersection = (p * t).sum()
        return 1 - 2 * ((intersection + self.smooth) / (p.sum() + t.sum() + self.smooth))


class SegNet(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, ch, 3, 2, 1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(ch, ch, 3, 2, 1), nn.ReLU())
        self.up = nn.ConvTranspose2d(ch, ch, 4, 4)
        self.last = nn.Conv2d(ch, 1, 1)

    def forward(self, x):
        return self.last(F.relu(self.up(self.down2(self.down1(x)))))


def pictures(n, size=112):
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    cx, cy, r = (torch.rand(3, n, 1, 1) - 0.5) * torch.tensor([0.6, 0.6, 0.1]).view(3, 1, 1, 1)
    mask = ((xx - cx) ** 2 + (yy - cy) ** 2 < (0.55 + r) ** 2).float().unsqueeze(1)
    return mask * torch.tensor([0.9, 0.2, 0.3]).view(1, 3, 1, 1) + 0.8 * torch.randn(n, 3, size, size), mask


torch.manual_seed(58)
model, dice = SegNet(), DiceLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(40):
    x, mask = pictures(16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
        loss = 0.2 * F.binary_cross_entropy_with_logits(logits.float(), mask) + dice(logits, mask)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
