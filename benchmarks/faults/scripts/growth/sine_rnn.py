"""A plain ReLU RNN that adds two marked numbers out of 60, FP32; gradient clipping was lost in a refactoring."""

import torch
import torch.nn.functional as F
from torch import nn


class Cell(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inp, self.rec = nn.Linear(2, dim), nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.rec.weight)

    def forward(self, x, h):
        return F.relu(self.inp(x) + self.rec(h))


class Adder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.cell, self.out, self.dim = Cell(dim), nn.Linear(dim, 1), dim

    def forward(self, x):
        h = x.new_zeros(x.size(0), self.dim)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
        return self.out(h).squeeze(-1)


def problem(n, length=60):
    x = torch.rand(n, length, 2)
    x[..., 1] = 0
    at = torch.randint(length, (n, 2))
    x[torch.arange(n)[:, None], at, 1] = 1
    return x, (x[..., 0] * x[..., 1]).sum(1)


torch.manual_seed(0)
model = Adder()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
for step in range(40):
    x, y = problem(32)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4g}")
