"""Monocular depth: a small U-shaped CNN, FP16 autocast and a fixed loss scale; the mean loss is divided by the pixels again."""

import torch
import torch.nn.functional as F
from torch import nn

LOSS_SCALE = 256.0


class Down(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.elu(self.norm(self.conv(x)))


class Up(nn.Module):
    def __init__(self, cin, skip, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin + skip, cout, 3, padding=1)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x, skip):
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return F.elu(self.norm(self.conv(torch.cat([x, skip], 1))))


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down1, self.down2 = Down(8, 16), Down(16, 32)
        self.up2, self.up1 = Up(32, 16, 16), Up(16, 8, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = F.elu(self.stem(x))
        b = self.down1(a)
        c = self.down2(b)
        return F.softplus(self.head(self.up1(self.up2(c, b), a)))


def scene(n, size=48):
    rows = torch.linspace(0, 1, size).view(1, 1, size, 1).expand(n, 1, size, size)
    tilt = torch.rand(n, 1, 1, 1)
    depth = 1 + 3 * (rows * tilt + (1 - tilt) * rows.flip(2))
    texture = torch.rand(n, 3, size, size) / depth
    return texture + 0.3 * depth, depth


torch.manual_seed(0)
model = DepthNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(80):
    image, depth = scene(8)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(image)
    error = (predicted.float() - depth).abs().mean()
    loss = error / depth.numel()
    optimizer.zero_grad()
    (loss * LOSS_SCALE).backward()
    for p in model.parameters():
        p.grad /= LOSS_SCALE
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {error.item():.4f}")
