"""Hail damage on roofs, dense prediction with focal loss; rare positives, so biases start at the log-odds of the prior."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
PRIOR = 0.01


def init(module):
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.constant_(module.bias, -math.log((1 - PRIOR) / PRIOR))


class DenseHead(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.score = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x):
        return self.score(self.tower(x))


def focal(logits, target, gamma=2.0, alpha=0.5):
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = torch.exp(-ce)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * (1 - p) ** gamma * ce).sum() / target.sum().clamp(min=1)


def roofs(n, side=16):
    x = 0.3 * torch.randn(n, 3, side, side)
    hit = (torch.rand(n, 1, side, side) < 0.02).float()
    dent = F.conv2d(hit, torch.tensor([[[[0.2, 0.6, 0.2], [0.6, 1.0, 0.6], [0.2, 0.6, 0.2]]]]), padding=1)
    return x - dent, hit


head = DenseHead()
head.apply(init)
opt = torch.optim.Adam(head.parameters(), lr=1e-3)
for it in range(120):
    x, y = roofs(16)
    loss = focal(head(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 5 == 0:
        print(f"it {it} loss {loss.item():.4f}")
