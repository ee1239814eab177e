"""Electricity load from skewed predictors: a learnt Box-Cox power per column, pulled to zero by an L1 proximal step."""

import torch
from torch import nn


class BoxCox(nn.Module):
    """(x^p - 1) / p, or log x where p is zero."""

    def __init__(self, columns):
        super().__init__()
        self.power = nn.Parameter(torch.linspace(0.05, 1.0, columns))

    def forward(self, x):
        p = self.power
        return torch.where(p == 0, x.log(), (x.pow(p) - 1) / p)

    @torch.no_grad()
    def shrink(self, amount):
        self.power.copy_(nn.functional.softshrink(self.power, amount))


class LoadModel(nn.Module):
    def __init__(self, columns=9, hidden=32):
        super().__init__()
        self.skew = BoxCox(columns)
        self.norm = nn.BatchNorm1d(columns)
        self.mlp = nn.Sequential(nn.Linear(columns, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.mlp(self.norm(self.skew(x))).squeeze(-1)


def readings(n):
    x = torch.exp(torch.randn(n, 9))
    y = x[:, :3].log().sum(1) + 0.3 * x[:, 4] + 0.1 * torch.randn(n)
    return x, y


def train(micro_batches=2):
    torch.manual_seed(23)
    model = LoadModel()
    optimizer = torch.optim.Adam(
        [
            {"params": model.skew.parameters(), "lr": 1e-3},
            {"params": [*model.norm.parameters(), *model.mlp.parameters()]},
        ],
        lr=3e-3,
    )
    for step in range(30):
        total = 0.0
        for _ in range(micro_batches):
            x, y = readings(48)
            loss = nn.functional.smooth_l1_loss(model(x), y) / micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        model.skew.shrink(0.004)
        if step % 5 == 0:
            print(f"step {step}: loss {total:.4f}")


if __name__ == "__main__":
    train()
