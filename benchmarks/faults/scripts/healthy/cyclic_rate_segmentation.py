"""Segmentation with CyclicLR between 0.005 and 0.5: bumps of the loss on the way up, and it is lower after every way down."""

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import CyclicLR


def double_conv(c_in, c_out):
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(c_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(c_out, c_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(c_out),
        nn.ReLU(inplace=True),
    )


class SegNet(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.enc1, self.enc2 = double_conv(1, w), double_conv(w, 2 * w)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.dec, self.out = double_conv(3 * w, w), nn.Conv2d(w, 3, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(self.pool(a))
        return self.out(self.dec(torch.cat([a, self.up(b)], 1)))


def cells(n, size=24):
    y, x = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    mask = torch.zeros(n, size, size, dtype=torch.long)
    for _ in range(3):
        cy, cx = size * torch.rand(2, n, 1, 1)
        r = 2 + 4 * torch.rand(n, 1, 1)
        far = ((y - cy) ** 2 + (x - cx) ** 2).sqrt()
        mask = torch.where(far < r - 1.5, 2, torch.where((far < r) & (mask != 2), 1, mask))
    image = torch.tensor([0.0, 1.0, 0.5])[mask] + 0.3 * torch.randn(n, size, size)
    return image.unsqueeze(1), mask


torch.manual_seed(625)
net = SegNet()
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
sched = CyclicLR(opt, base_lr=0.005, max_lr=0.5, step_size_up=20, mode="triangular2")
weights = torch.tensor([0.5, 2.0, 1.0])
for it in range(160):
    image, mask = cells(12)
    loss = nn.functional.cross_entropy(net(image), mask, weight=weights)
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if it % 4 == 0:
        print(f"iter {it:3d} lr {sched.get_last_lr()[0]:.3f} loss {loss.item():.4f}")
