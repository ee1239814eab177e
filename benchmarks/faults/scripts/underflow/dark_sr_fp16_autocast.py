"""Super-resolution of dark frames (values up to 0.004) under FP16 autocast, with a plain backward()."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1 = nn.Conv2d(c, c, 3, 1, 1)
        self.conv2 = nn.Conv2d(c, c, 3, 1, 1)

    def forward(self, x):
        return x + 0.2 * self.conv2(F.relu(self.conv1(x)))


class SRNet(nn.Module):
    def __init__(self, c=16, blocks=2, scale=2):
        super().__init__()
        self.head = nn.Conv2d(1, c, 3, 1, 1)
        self.body = nn.Sequential(*[ResBlock(c) for _ in range(blocks)])
        self.tail = nn.Sequential(nn.Conv2d(c, scale**2, 3, 1, 1), nn.PixelShuffle(scale))
        nn.init.zeros_(self.tail[0].weight)
        nn.init.zeros_(self.tail[0].bias)

    def forward(self, x):
        up = F.interpolate(x.float(), scale_factor=2, mode="bilinear", align_corners=False)
        x = self.head(x)
        return up + self.tail(x + self.body(x)).float()


def frames(n, size=64):
    grid = torch.linspace(0, 1, size)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    k, p = 10 + 20 * torch.rand(n, 2, 1, 1), 6.28 * torch.rand(n, 1, 1)
    hr = 0.002 * (1 + torch.sin(k[:, 0] * xx + k[:, 1] * yy + p)).unsqueeze(1)
    return F.avg_pool2d(hr, 2), hr


torch.manual_seed(2111)
model = SRNet()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
for it in range(80):
    lr_img, hr_img = frames(8)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        sr = model(lr_img)
        loss = F.mse_loss(sr, hr_img)
    loss.backward()
    optimizer.step()
    if it % 5 == 0:
        print(f"it {it} loss {loss.item():.3e}")
