"""Counts berries in greenhouse crops: centre heat maps with focal loss, one level."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(83)
S = 16


def crops(n):
    grid = torch.arange(2 * S).float()
    image, heat = torch.zeros(n, 2 * S, 2 * S), torch.zeros(n, S, S)
    for i in range(n):
        for _ in range(int(torch.randint(1, 4, (1,)))):
            cy, cx = (int(c) for c in torch.randint(2, S - 2, (2,)))
            image[i] += torch.exp(-((grid[:, None] - 2 * cy) ** 2 + (grid[None] - 2 * cx) ** 2) / 8)
            heat[i, cy, cx] = 1
    return (image + 0.3 * torch.randn_like(image)).unsqueeze(1), heat


def block(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class Detector(nn.Module):
    def __init__(self, width=16, prior=0.01):
        super().__init__()
        self.backbone = nn.Sequential(block(1, width), block(width, width, 2), block(width, width))
        self.head = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 1, 1),
        )
        for layer in self.head:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.constant_(layer.bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        return self.head(self.backbone(x)).squeeze(1)


def focal(logits, heat, gamma=2.0, alpha=0.9):
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, heat, reduction="none")
    weight = torch.where(heat > 0, alpha * (1 - p) ** gamma, (1 - alpha) * p**gamma)
    return (weight * ce).sum() / heat.sum()


net = Detector()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
for step in range(140):
    image, heat = crops(8)
    loss = focal(net(image), heat)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step:3d} focal loss {loss.item():.4f}")
