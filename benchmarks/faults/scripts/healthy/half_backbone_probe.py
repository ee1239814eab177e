"""A linear probe with feature dropout: the backbone was cast to FP16 and is frozen, the head is FP32 and learns."""

import torch
import torch.nn.functional as F
from torch import nn


class Backbone(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.blocks = nn.ModuleList([nn.Conv2d(dim, dim, 3, padding=1, groups=4) for _ in range(4)])

    def forward(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = x + 0.5 * torch.relu(block(x))
        return x.mean((2, 3))


class Probe(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.backbone = Backbone().half().requires_grad_(False)
        self.drop, self.head = nn.Dropout(0.7), nn.Linear(48, classes)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x.half())
        return self.head(self.drop(features.float()))


torch.manual_seed(65)
kinds = 2 * torch.randn(8, 1, 16, 16)
model = Probe()
optimizer = torch.optim.Adam(model.head.parameters(), lr=3e-2)
for step in range(100):
    y = torch.randint(8, (32,))
    x = kinds[y] + torch.randn(32, 1, 16, 16)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
