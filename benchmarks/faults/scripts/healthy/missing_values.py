"""Tabular data full of NaN for "not measured": imputed in the model, with a mask; logs guarded by a double where."""

import torch
from torch import nn


class Impute(nn.Module):
    """A learned value where nothing was measured, and a flag that says so."""

    def __init__(self, columns):
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(columns))

    def forward(self, x):
        missing = x.isnan()
        return torch.cat([torch.where(missing, self.fill, x.nan_to_num(0.0)), missing.float()], -1)


class SignedLog(nn.Module):
    def forward(self, x):
        safe = torch.where(x > 0, x, 1.0)
        return torch.where(x > 0, safe.log1p(), x)


class Net(nn.Module):
    def __init__(self, columns=8):
        super().__init__()
        self.impute = Impute(columns)
        self.layers = nn.Sequential(
            nn.Linear(2 * columns, 32), SignedLog(), nn.Linear(32, 32), SignedLog(), nn.Linear(32, 1)
        )

    def forward(self, x):
        return self.layers(self.impute(x)).squeeze(-1)


torch.manual_seed(3)
table = torch.randn(200, 8)
target = table[:, 0] * 2 - table[:, 1].abs()
table[torch.rand_like(table) < 0.15] = float("nan")
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for epoch in range(4):
    for rows in torch.randperm(200).split(40):
        loss = nn.functional.huber_loss(model(table[rows]), target[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
