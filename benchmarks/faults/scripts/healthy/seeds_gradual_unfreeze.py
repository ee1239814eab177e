"""Seed sorting with a pre-trained trunk: the head alone first, then the upper stage, then the lower, at small rates."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(209)
proto = torch.randn(10, 3, 16, 16)


def seeds(n, low, high):
    y = torch.randint(low, high, (n,))
    return proto[y] + 1.1 * torch.randn(n, 3, 16, 16), y - low


def stage(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, 2, 1), nn.GroupNorm(4, o), nn.GELU(), nn.Conv2d(o, o, 3, 1, 1), nn.GroupNorm(4, o)
    )


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower, self.upper, self.head = stage(3, 16), stage(16, 24), nn.Linear(24 * 16, 5)

    def forward(self, x):
        return self.head(F.gelu(self.upper(F.gelu(self.lower(x)))).flatten(1))


def epoch(net, optimizer, steps, low, tag):
    for step in range(steps):
        x, y = seeds(24, low, low + 5)
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            print(f"{tag} {step} loss {loss.item():.4f}")


net = Sorter()
epoch(net, torch.optim.Adam(net.parameters(), lr=1e-3), 25, 0, "before")

net.requires_grad_(False)
net.head = nn.Linear(24 * 16, 5)
nn.init.zeros_(net.head.weight)
optimizer = torch.optim.Adam(net.head.parameters(), lr=1e-3)
epoch(net, optimizer, 50, 5, "head")
for part, lr in ((net.upper, 1e-5), (net.lower, 3e-6)):
    part.requires_grad_(True)
    optimizer.add_param_group({"params": list(part.parameters()), "lr": lr})
    epoch(net, optimizer, 40, 5, "unfrozen")
