"""ReZero residual branches (all gains zero at first) with a warm-up that starts at a rate of exactly zero."""

import torch
import torch.nn.functional as F
from torch import nn


class Branch(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gain * self.fc2(F.gelu(self.fc1(x)))


class ReZero(nn.Module):
    def __init__(self, features=16, dim=32, depth=12):
        super().__init__()
        self.inp = nn.Linear(features, dim)
        self.branches = nn.Sequential(*(Branch(dim) for _ in range(depth)))
        self.out = nn.Linear(dim, 1)
        nn.init.zeros_(self.out.weight)

    def forward(self, x):
        return self.out(self.branches(self.inp(x))).squeeze(-1)


torch.manual_seed(0)
model = ReZero()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 30))
for step in range(120):
    x = torch.randn(128, 16)
    y = x[:, 0] * x[:, 1] + x[:, 2].abs()
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
