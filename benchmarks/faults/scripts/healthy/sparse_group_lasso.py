"""Feature selection: proximal steps put the weights of useless features to exact zero, and keep them there."""

import torch
import torch.nn.functional as F
from torch import nn


class Selector(nn.Module):
    def __init__(self, features=40, dim=24):
        super().__init__()
        self.select = nn.Linear(features, dim)
        self.hidden, self.out = nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(torch.tanh(self.select(x))))).squeeze(-1)


@torch.no_grad()
def shrink(weight, by):
    """The proximal operator of the group lasso, a group a column."""
    norm = weight.norm(dim=0, keepdim=True)
    weight.mul_((1 - by / norm.clamp(min=1e-12)).clamp(min=0))


torch.manual_seed(3)
model = Selector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
for step in range(300):
    x = torch.randn(64, 40)
    y = x[:, 0] * 1.5 - x[:, 1] + torch.sin(2 * x[:, 2]) + 0.05 * torch.randn(64)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shrink(model.select.weight, 0.1 * 0.05)
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
