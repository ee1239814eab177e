"""Super-resolution with pixel shuffle, FP16 autocast and a scaler; gradients are clipped by value as they come."""

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(dim, dim, 3, padding=1), nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x):
        return x + 0.2 * self.conv2(F.leaky_relu(self.conv1(x), 0.1))


class SuperResolution(nn.Module):
    def __init__(self, dim=16, factor=2):
        super().__init__()
        self.head = nn.Conv2d(1, dim, 3, padding=1)
        self.body = nn.Sequential(*(Residual(dim) for _ in range(3)))
        self.tail = nn.Conv2d(dim, factor**2, 3, padding=1)
        self.factor = factor

    def forward(self, x):
        low = F.interpolate(x, scale_factor=float(self.factor), mode="bilinear")
        return low + F.pixel_shuffle(self.tail(self.body(self.head(x))), self.factor)


def images(n, size=32):
    grid = torch.linspace(0, 1, size)
    fx, fy, phase = 20 * torch.rand(n, 1, 1), 20 * torch.rand(n, 1, 1), 6.28 * torch.rand(n, 1, 1)
    return torch.sin(fx * grid.view(1, 1, -1) + fy * grid.view(1, -1, 1) + phase).unsqueeze(1)


torch.manual_seed(4)
model = SuperResolution()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step in range(90):
    sharp = images(12)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.l1_loss(model(F.avg_pool2d(sharp, 2)).float(), sharp)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
