"""Re-identification by triplets, FP32. The hinge of the triplet loss was lost: negatives are pushed away for ever."""

import torch
import torch.nn.functional as F
from torch import nn

MARGIN = 0.3


class ReID(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.bottleneck = nn.Linear(96, 64)
        self.embedding = nn.Linear(64, d)

    def forward(self, crop):
        return self.embedding(F.leaky_relu(self.bottleneck(self.trunk(crop))))


def triplet_loss(anchor, positive, negative):
    near = (anchor - positive).square().sum(1)
    far = (anchor - negative).square().sum(1)
    return (near - far + MARGIN).mean()


torch.manual_seed(413)
people = torch.rand(12, 1, 12, 12)
net = ReID()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for it in range(110):
    a = torch.randint(12, (32,))
    n = (a + torch.randint(1, 12, (32,))) % 12
    crops = torch.cat([people[a], people[a], people[n]]) + 0.2 * torch.randn(96, 1, 12, 12)
    loss = triplet_loss(*net(crops).chunk(3))
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if it % 3 == 0:
        print(f"iter {it}  loss = {loss.item():.4f}")
