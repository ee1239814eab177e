"""Residual MLP of 30 blocks for the power of a wind turbine. Norm layers were dropped to make it faster."""

import torch
import torch.nn as nn
import torch.nn.functional as F

DEPTH = 30
NORM = nn.Identity


class ResBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = NORM(dim)
        self.lin1 = nn.Linear(dim, dim)
        self.lin2 = nn.Linear(dim, dim)
        nn.init.kaiming_normal_(self.lin1.weight)
        nn.init.kaiming_normal_(self.lin2.weight)

    def forward(self, x):
        return x + self.lin2(F.relu(self.lin1(self.norm(x))))


class TurbineNet(nn.Module):
    def __init__(self, features=8, dim=48):
        super().__init__()
        self.stem = nn.Linear(features, dim)
        self.blocks = nn.Sequential(*[ResBlock(dim) for _ in range(DEPTH)])
        self.final_norm = NORM(dim)
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        return self.head(self.final_norm(self.blocks(self.stem(x)))).squeeze(-1)


def telemetry(n):
    x = torch.randn(n, 8)
    wind = x[:, 0]
    return x, torch.sigmoid(2 * wind) * (1 + 0.2 * x[:, 1]) - 0.3 * torch.tanh(x[:, 2] * x[:, 3])


torch.manual_seed(30)
model = TurbineNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for it in range(150):
    x, y = telemetry(128)
    loss = F.smooth_l1_loss(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if it % 5 == 0:
        print(f"it {it} loss {loss.item():.4f}")
