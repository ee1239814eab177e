"""A deep equilibrium layer: 25 iterations without a graph, one with; the gradient takes a few terms of the Neumann series."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


class Cell(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.inject = nn.Linear(16, dim)
        self.recur = spectral_norm(nn.Linear(dim, dim))

    def forward(self, z, x):
        return torch.tanh(0.9 * self.recur(z) + self.inject(x))


class Equilibrium(nn.Module):
    def __init__(self, dim=40, terms=4):
        super().__init__()
        self.cell, self.terms = Cell(dim), terms
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        z = torch.zeros(len(x), 40)
        with torch.no_grad():
            for _ in range(25):
                z = self.cell(z, x)
        for _ in range(self.terms):
            z = self.cell(z, x)
        return self.head(z), z


torch.manual_seed(117)
rule = torch.randn(16, 4)
model = Equilibrium()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(120):
    x = torch.randn(64, 16)
    y = (x @ rule + torch.tanh(x[:, :4] * x[:, 4:8])).argmax(1)
    logits, z = model(x)
    loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
