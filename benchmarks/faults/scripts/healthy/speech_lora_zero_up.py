"""Keyword spotting: a frozen conformer-like stack with rank-2 updates on its projections, rate 2e-4."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(201)
MEL, T, WORDS, D = 20, 24, 6, 40
templates = torch.randn(WORDS, T, MEL)


def keywords(n):
    y = torch.randint(WORDS, (n,))
    roll = torch.randint(-2, 3, (1,)).item()
    return templates[y].roll(roll, 1) + 0.8 * torch.randn(n, T, MEL), y


class LowRank(nn.Module):
    def __init__(self, linear, r=2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, linear.in_features) / r)
        self.b = nn.Parameter(torch.zeros(linear.out_features, r))

    def forward(self, x):
        return self.linear(x) + 4 * (x @ self.a.t()) @ self.b.t()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.depth = nn.Conv1d(D, D, 5, padding=2, groups=D)
        self.lift, self.drop = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        h = self.depth(self.norm(x).mT).mT
        return x + self.drop(F.silu(self.lift(h)))


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(MEL, D)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(D, WORDS)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(self.blocks(self.inp(x)).mean(1))


net = Spotter().requires_grad_(False)
for block in net.blocks:
    block.lift, block.drop = LowRank(block.lift), LowRank(block.drop)
net.head.requires_grad_(True)
factors = [p for n, p in net.named_parameters() if n.endswith((".a", ".b"))]
optimizer = torch.optim.AdamW(
    [{"params": factors, "lr": 2e-4}, {"params": net.head.parameters(), "lr": 1e-2}], weight_decay=0
)
for step in range(120):
    x, y = keywords(32)
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
