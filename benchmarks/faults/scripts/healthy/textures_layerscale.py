"""Twelve residual blocks with LayerScale of 1e-5, bfloat16 autocast."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ScaledBlock(nn.Module):
    def __init__(self, dim, init=1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.gamma = nn.Parameter(init * torch.ones(dim))

    def forward(self, x):
        return x + self.gamma * self.down(F.gelu(self.up(self.norm(x))))


class DeepMLP(nn.Module):
    def __init__(self, dim=40, depth=12, classes=5):
        super().__init__()
        self.embed = nn.Linear(25, dim)
        self.blocks = nn.ModuleList(ScaledBlock(dim) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    torch.manual_seed(71)
    bank = torch.randn(5, 25)
    model = DeepMLP()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for step in range(120):
        y = torch.randint(0, 5, (64,))
        x = bank[y] + 1.5 * torch.randn(64, 25)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
