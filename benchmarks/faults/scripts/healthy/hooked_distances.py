"""Siamese shape matching: coincident points have no gradient of their distance; a hook replaces it by zero."""

import torch
from torch import nn


class PointEncoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.move = nn.Linear(dim, 3)

    def forward(self, points):
        h = self.local(points)
        pooled = h.amax(1, keepdim=True)
        return points + 0.1 * torch.tanh(self.move(h + pooled))


def chamfer(a, b):
    """Mean distance to the nearest point of the other cloud, both ways."""
    gap = a[:, :, None] - b[:, None]
    if gap.requires_grad:
        gap.register_hook(lambda g: torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0))
    distance = gap.square().sum(-1).sqrt()
    return distance.amin(2).mean() + distance.amin(1).mean()


def clouds(n, generator):
    base = torch.rand(n, 24, 3, generator=generator)
    target = base.clone()
    target[..., 2] += 0.2 * torch.sin(6 * base[..., 0])
    return base, target


torch.manual_seed(2)
generator = torch.Generator().manual_seed(2)
encoder = PointEncoder()
nn.init.zeros_(encoder.move.weight)
nn.init.zeros_(encoder.move.bias)
optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
for step in range(25):
    source, target = clouds(8, generator)
    # the identity is part of the task: half of the targets are the source itself
    target[:4] = source[:4]
    loss = chamfer(encoder(source), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} chamfer {loss.item():.5f}")
