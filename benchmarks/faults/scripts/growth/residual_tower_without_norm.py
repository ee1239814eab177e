"""A residual tower without norms: every block adds a branch as large as its input."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BLOCKS, WIDTH = 20, 48
BRANCH_GAIN = 1.0


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        for fc in (self.fc1, self.fc2):
            nn.init.kaiming_normal_(fc.weight)
            nn.init.zeros_(fc.bias)
        with torch.no_grad():
            self.fc2.weight.mul_(BRANCH_GAIN)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(x)))


class Tower(nn.Module):
    def __init__(self, inputs=10):
        super().__init__()
        self.stem = nn.Linear(inputs, WIDTH)
        self.blocks = nn.Sequential(*[Block(WIDTH) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x))).squeeze(-1)


torch.manual_seed(2144)
model = Tower()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for step in range(120):
    x = torch.rand(64, 10)  # the Friedman benchmark
    y = 10 * torch.sin(3.14 * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4g}")
