"""Thirty residual blocks without a norm, and without a factor that makes up for their number."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, factor):
        super().__init__()
        self.up, self.down, self.factor = nn.Linear(width, width), nn.Linear(width, width), factor
        nn.init.kaiming_normal_(self.up.weight)
        nn.init.kaiming_normal_(self.down.weight)

    def forward(self, x):
        return x + self.factor * self.down(torch.relu(self.up(x)))


class Inversion(nn.Module):
    def __init__(self, traces=12, width=24, depth=30, factor=1.0):
        super().__init__()
        self.stem = nn.Linear(traces, width)
        self.blocks = nn.ModuleList(Block(width, factor) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def shots(n, physics):
    x = torch.randn(n, 12)
    return x, torch.tanh(x @ physics)


if __name__ == "__main__":
    torch.manual_seed(3135)
    physics = torch.randn(12, 3) / 3
    model = Inversion(factor=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for step in range(60):
        x, y = shots(32, physics)
        loss = nn.functional.smooth_l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 5:
            print(f"{step + 1:3d} loss {loss.item():.4f}")
