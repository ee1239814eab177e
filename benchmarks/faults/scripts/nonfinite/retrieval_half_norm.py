"""Two-tower retrieval. The towers run in FP16, and embeddings are normalised where they are made."""

import torch
from torch import nn
from torch.nn import functional as F


class UnitLength(nn.Module):
    def forward(self, x):
        squares = (x * x).sum(-1, keepdim=True)
        return x * torch.rsqrt(squares + 1e-6)


class Tower(nn.Module):
    def __init__(self, inputs, dim, dtype=torch.float16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, dim))
        self.unit = UnitLength()
        self.dtype = dtype

    def forward(self, x):
        return self.unit(self.body(x).to(self.dtype)).to(x.dtype)


class Retrieval(nn.Module):
    def __init__(self, query_inputs=16, item_inputs=16, dim=32):
        super().__init__()
        self.query, self.item = Tower(query_inputs, dim), Tower(item_inputs, dim)

    def forward(self, queries, items):
        return 15.0 * self.query(queries) @ self.item(items).t()


def interactions(n, link):
    """Queries and the items clicked. Popular items carry raw counts of views, and so do their features."""
    taste = torch.randn(n, 8)
    popularity = torch.where(torch.rand(n, 1) < 0.4, 2500.0, 2.0)
    return taste @ link[0], popularity * (taste @ link[1])


class Loop:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def step(self, queries, items):
        logits = self.model(queries, items)
        targets = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main():
    torch.manual_seed(21013)
    link = torch.randn(2, 8, 16) / 3
    model = Retrieval()
    loop = Loop(model, lr=2e-3)
    for step in range(60):
        queries, items = interactions(48, link)
        loss = loop.step(queries, items)
        if step % 2 == 0:
            print(f"step={step} loss={loss:.4f}")
    with torch.no_grad():
        lost = float((model.item(items).abs().sum(1) == 0).double().mean())
    return lost


if __name__ == "__main__":
    lost = main()
