"""City budgets in yen, raw columns up to 1e9, a first layer that divides, FP32 all the way; MAPE-like loss."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(603)


class BudgetNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.inp, self.norm = nn.Linear(8, width), nn.BatchNorm1d(width)
        self.mid, self.out = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x):
        return F.softplus(self.out(F.relu(self.mid(F.relu(self.norm(self.inp(x)))))).squeeze(-1)) * 1e8


share = torch.rand(8)
model = BudgetNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(250):
    columns = torch.rand(64, 8) * 1e9 * torch.rand(64, 1)
    spent = 1e7 + columns @ (share / 4)
    prediction = model(columns)
    loss = ((prediction - spent).abs() / spent).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f} largest {prediction.max().item():.3g}")
