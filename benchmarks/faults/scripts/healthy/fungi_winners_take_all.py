"""Mushrooms by their features: a layer in which only eight of 96 units may fire, so that most are silent every time."""

import torch
import torch.nn.functional as F
from torch import nn


class KWinners(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        threshold = x.topk(self.k, dim=1).values[:, -1:]
        return torch.where(x >= threshold, x, torch.zeros_like(x))


class FungiNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(22, 96)
        self.winners = KWinners(8)
        self.edible = nn.Linear(96, 5)

    def forward(self, x):
        return self.edible(self.winners(self.encode(x)))


torch.manual_seed(106)
centres = torch.randn(15, 22)
model = FungiNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(200):
    group = torch.randint(15, (64,))
    x = centres[group] + 0.6 * torch.randn(64, 22)
    loss = F.cross_entropy(model(x), group % 5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
