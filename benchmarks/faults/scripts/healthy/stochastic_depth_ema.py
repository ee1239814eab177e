"""A residual CNN under BF16 autocast: branches are dropped at random, labels smoothed, an FP32 average follows slowly."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Branch(nn.Module):
    def __init__(self, dim, drop):
        super().__init__()
        self.norm = nn.GroupNorm(4, dim)
        self.conv1, self.conv2 = nn.Conv2d(dim, dim, 3, padding=1), nn.Conv2d(dim, dim, 3, padding=1)
        self.gamma = nn.Parameter(1e-4 * torch.ones(dim, 1, 1))
        self.drop = drop

    def forward(self, x):
        if self.training and torch.rand(()) < self.drop:
            return x
        return x + self.gamma * self.conv2(F.gelu(self.conv1(self.norm(x)))) / (1 - self.drop)


class Net(nn.Module):
    def __init__(self, dim=24, depth=6, classes=6):
        super().__init__()
        self.stem = nn.Conv2d(1, dim, 4, 4)
        self.branches = nn.ModuleList(Branch(dim, 0.6 * i / depth) for i in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = branch(x)
        return self.head(F.gelu(x).mean((2, 3)))


torch.manual_seed(4)
model = Net()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=160)
prototypes = torch.randn(6, 1, 24, 24)
for step in range(160):
    y = torch.randint(6, (32,))
    x = prototypes[y] + 1.2 * torch.randn(32, 1, 24, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters()):
            slow.lerp_(fast, 1e-4)
    if step % 4 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
