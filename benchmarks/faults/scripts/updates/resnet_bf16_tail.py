"""A ResNet with BF16 weights at the end of its cosine schedule: SGD with learning rates of 1e-4 and below."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Basic(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(h)))


class ResNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.stage = nn.Sequential(Basic(width), Basic(width))
        self.fc = nn.Linear(width, 6)

    def forward(self, x):
        return self.fc(self.stage(self.stem(x)).mean((2, 3)))


torch.manual_seed(0)
model = ResNet().to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * min(t, 30) / 30)))
prototypes = torch.randn(6, 3, 8, 8)
for step in range(24):
    y = torch.randint(6, (32,))
    x = (prototypes[y] + torch.randn(32, 3, 8, 8)).to(torch.bfloat16)
    loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
