"""Sparse experts under BF16 autocast: the router is FP32, takes two of eight, and is balanced by a small loss."""

import torch
from torch import nn
from torch.nn import functional as F


class Router(nn.Module):
    def __init__(self, dim, experts, k=2):
        super().__init__()
        self.gate, self.k = nn.Linear(dim, experts, bias=False), k

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            probabilities = self.gate(x.to(torch.float32)).softmax(-1)
        weight, chosen = probabilities.topk(self.k, -1)
        load = F.one_hot(chosen, probabilities.shape[-1]).sum(1).to(probabilities.dtype).mean(0)
        balance = probabilities.shape[-1] * (load / self.k * probabilities.mean(0)).sum()
        return weight / weight.sum(-1, keepdim=True), chosen, balance


class Experts(nn.Module):
    def __init__(self, dim=24, experts=8):
        super().__init__()
        self.router = Router(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim)) for _ in range(experts)
        )

    def forward(self, x):
        weight, chosen, balance = self.router(x)
        y = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows, place = (chosen == n).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, (weight[rows, place, None] * expert(x[rows])).to(y.dtype))
        return x + y, balance


class Model(nn.Module):
    def __init__(self, inputs=12, dim=24, classes=6):
        super().__init__()
        self.embed, self.moe = nn.Linear(inputs, dim), Experts(dim)
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        y, balance = self.moe(self.embed(x))
        return self.out(self.norm(y)), balance


def dialects(n, centres):
    group = torch.randint(len(centres), (n,))
    x = centres[group] + 0.7 * torch.randn(n, 12)
    return x, group % 6


def main():
    torch.manual_seed(21107)
    centres = 1.5 * torch.randn(18, 12)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(60):
        x, label = dialects(128, centres)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, balance = model(x)
        loss = F.cross_entropy(logits.to(torch.float32), label)
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        optimizer.step()
        if step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f} balance {balance.item():.3f}")


if __name__ == "__main__":
    main()
