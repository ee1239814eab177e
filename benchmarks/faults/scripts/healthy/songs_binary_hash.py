"""Learns 24-bit hashes of songs: sign() with a clipped straight-through gradient, and a triplet loss that is often zero."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SignSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Hasher(nn.Module):
    def __init__(self, features=24, bits=24):
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(features, 64), nn.BatchNorm1d(64), nn.Linear(64, bits)

    def forward(self, x):
        return SignSTE.apply(self.fc2(F.relu(self.bn(self.fc1(x)))))


def songs(n):
    k = torch.randint(12, (n,))
    return (
        artists[k] + 1.2 * torch.randn(n, 24),
        artists[k] + 1.2 * torch.randn(n, 24),
        artists[(k + 1) % 12] + 1.2 * torch.randn(n, 24),
    )


torch.manual_seed(1982)
artists = 1.2 * torch.randn(12, 24)
model = Hasher()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(160):
    a, p, n = songs(64)
    codes = model(torch.cat([a, p, n])).chunk(3)
    near, far = (codes[0] * codes[1]).mean(1), (codes[0] * codes[2]).mean(1)
    loss = F.relu(0.5 - near + far).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
