"""Sugar in fruit from near-infrared spectra on a large pedestal; each is standardised with the fast variance."""

import torch
from torch import nn


class Standardise(nn.Module):
    def __init__(self, eps=1e-3):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (variance.clamp(min=0) + self.eps).sqrt()


class SugarNet(nn.Module):
    def __init__(self, bands=32):
        super().__init__()
        self.standardise = Standardise()
        self.net = nn.Sequential(nn.Linear(bands, 48), nn.GELU(), nn.Linear(48, 1))

    def forward(self, x):
        return self.net(self.standardise(x)).squeeze(-1)


class Fruit:
    def __init__(self):
        self.line = torch.randn(32)

    def sample(self, n=64):
        sugar = torch.randn(n)
        shape = sugar.unsqueeze(1) * self.line + 0.2 * torch.randn(n, 32)
        return 20000.0 + 3000 * torch.rand(n, 1) + shape.round(decimals=2), sugar


def main(steps=80):
    torch.manual_seed(3140)
    model, fruit = SugarNet(), Fruit()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        x, y = fruit.sample()
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 7:
            print("step", step + 1, "loss", f"{loss.item():.4f}")


main()
