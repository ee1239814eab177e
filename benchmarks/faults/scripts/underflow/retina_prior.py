"""A one-class detector with focal loss, FP32. The prior bias of the class head went to the tower's last convolution, too."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return F.relu(self.conv2(F.relu(self.conv1(x))))


class Detector(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()
        )
        self.tower = Tower(width)
        self.cls = nn.Conv2d(width, 1, 3, padding=1)
        self.shortcut = nn.Conv2d(width, 1, 1)
        prior = -math.log((1 - 0.01) / 0.01)
        for name, m in self.named_modules():
            if name in ("tower.conv2", "cls"):
                nn.init.normal_(m.weight, std=0.01)
                nn.init.constant_(m.bias, prior)

    def forward(self, x):
        x = self.backbone(x)
        return self.cls(self.tower(x)) + self.shortcut(x)


def scenes(n):
    image, target = 0.3 * torch.randn(n, 3, 32, 32), torch.zeros(n, 1, 8, 8)
    for i in range(n):
        r, c = torch.randint(8, (2,)).tolist()
        image[i, :, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4] += 1.5
        target[i, 0, r, c] = 1
    return image, target


def focal(logits, target, gamma=2.0, alpha=0.25):
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = torch.sigmoid(logits)
    hit = p * target + (1 - p) * (1 - target)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * (1 - hit) ** gamma * ce).sum() / target.sum()


torch.manual_seed(0)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
for step in range(60):
    image, target = scenes(16)
    loss = focal(model(image), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
