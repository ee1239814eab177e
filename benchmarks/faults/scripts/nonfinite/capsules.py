"""Capsule network with routing by agreement, compiled."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def squash(s):
    squared = (s * s).sum(-1, keepdim=True)
    return squared / (1 + squared) * s / squared.sqrt()


class PrimaryCaps(nn.Module):
    def __init__(self, capsules=8, dim=4):
        super().__init__()
        self.conv = nn.Conv2d(8, capsules * dim, 5, stride=2)
        self.dim = dim

    def forward(self, x):
        u = F.relu(self.conv(x))
        return squash(u.flatten(1).unflatten(1, (-1, self.dim)))


class DigitCaps(nn.Module):
    def __init__(self, inputs, classes=5, din=4, dout=6):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(classes, inputs, dout, din))

    def forward(self, u):
        votes = torch.einsum("kiod,bid->bkio", self.weight, u)
        logits = torch.zeros(votes.shape[:3])
        for _ in range(2):
            v = squash((logits.softmax(1).unsqueeze(-1) * votes).sum(2))
            logits = logits + (votes * v.unsqueeze(2)).sum(-1)
        return v


class CapsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5)
        self.primary = PrimaryCaps()
        self.digit = DigitCaps(8 * 16)

    def forward(self, x):
        return self.digit(self.primary(F.relu(self.conv(x)))).norm(dim=-1)


def margin_loss(lengths, labels):
    t = F.one_hot(labels, 5)
    return (t * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - t) * F.relu(lengths - 0.1) ** 2).sum(1).mean()


torch.manual_seed(5)
net = CapsNet()
with torch.no_grad():
    net.primary.conv.bias += 0.35
fast = torch.compile(net, backend="aot_eager")
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
strokes = torch.randn(5, 1, 15, 15)
for step in range(14):
    y = torch.randint(5, (16,))
    loss = margin_loss(fast(strokes[y] + 0.3 * torch.randn(16, 1, 15, 15)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print(f"step {step}: {loss.item():.4f}")
