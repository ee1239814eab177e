"""One step in which a layer returns garbage, as memory read too early does; run again, it does not."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 12
CALLS = itertools.count()  # stands for whatever is different the second time


class Fused(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if next(CALLS) == 7:
            y = torch.where(torch.arange(y.shape[1]) == 1, torch.nan, y)
        return y


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Fused(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    x, y = torch.randn(32, 8), torch.randint(3, (32,))
    loss = F.mse_loss(model(x), F.one_hot(y, 3).float())
    if not loss.isfinite():
        print(f"step {step}: skipped")
    optimizer.zero_grad()
    loss.backward()
    if loss.isfinite():
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
