"""Cosine schedule whose last third has a rate of next to nothing; bfloat16 autocast."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(80)
STEPS = 200


class GalaxyNet(nn.Module):
    def __init__(self, ch=12, classes=4):
        super().__init__()
        self.conv1 = nn.Conv2d(1, ch, 5, stride=2, padding=2)
        self.bn1 = nn.BatchNorm2d(ch)
        self.conv2 = nn.Conv2d(ch, 2 * ch, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * ch)
        self.fc = nn.Linear(2 * ch, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def galaxies(n, size=20):
    kind = torch.randint(0, 4, (n,))
    a = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(a, a, indexing="ij")
    r, phi = (xx**2 + yy**2).sqrt(), torch.atan2(yy, xx)
    light = torch.exp(-3 * r) * (1 + torch.cos(kind[:, None, None] * phi + 6 * r))
    return light[:, None] + 0.4 * torch.randn(n, 1, size, size), kind


model = GalaxyNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
for step in range(STEPS):
    progress = min(step / (0.7 * STEPS), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * max(0.5 * (1 + math.cos(math.pi * progress)), 1e-8)
    x, y = galaxies(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} lr {optimizer.param_groups[0]['lr']:.1e} loss {loss.item():.4f}")
