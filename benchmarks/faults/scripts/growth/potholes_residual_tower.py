"""Depth of potholes from accelerometer windows: a tall residual MLP."""

import torch
import torch.nn as nn

torch.manual_seed(46)
WINDOW, DEPTH, WIDTH = 48, 20, 64


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        for fc in (self.fc1, self.fc2):
            nn.init.kaiming_normal_(fc.weight)
            nn.init.zeros_(fc.bias)

    def forward(self, x):
        return x + 1.0 * self.fc2(torch.relu(self.fc1(x)))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h).squeeze(1)


def windows(n):
    depth = torch.rand(n, 1) * 2
    at = torch.randint(8, WINDOW - 8, (n, 1))
    t = torch.arange(WINDOW)
    bump = depth * torch.exp(-((t - at) ** 2) / 8.0) * torch.cos((t - at) * 0.8)
    return bump + 0.1 * torch.randn(n, WINDOW), depth.squeeze(1)


net = Tower()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
for step in range(100):
    x, depth = windows(64)
    loss = nn.functional.l1_loss(net(x), depth)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4g}")
