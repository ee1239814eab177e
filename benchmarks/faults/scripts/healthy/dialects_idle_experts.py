"""A switch layer with 16 experts on data of four dialects: most experts are never chosen, and need not be."""

import torch
from torch import nn


class Expert(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Switch(nn.Module):
    def __init__(self, dim, experts=16):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim) for _ in range(experts)])

    def forward(self, x):
        gate, index = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i in index.unique().tolist():
            rows = (index == i).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[i](x[rows]) * gate[rows, None])
        return x + out


class Dialects(nn.Module):
    def __init__(self, dim=24, classes=12):
        super().__init__()
        self.inp = nn.Linear(20, dim)
        self.norm = nn.LayerNorm(dim)
        self.moe = Switch(dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        return self.out(self.moe(self.norm(self.inp(x))))


def main(steps=200):
    torch.manual_seed(107)
    centres, rules = 2 * torch.randn(4, 20), torch.randn(4, 20, 12)
    model = Dialects()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps):
        dialect = torch.randint(4, (96,))
        noise = torch.randn(96, 20)
        target = torch.einsum("bi,bij->bj", noise, rules[dialect]).argmax(1)
        loss = nn.functional.cross_entropy(model(centres[dialect] + noise), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
