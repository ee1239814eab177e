"""Gradient descent a little beyond twice the inverse curvature: loss and gradients grow step by step, no jump."""

import torch
from torch import nn

STEPS = 60

torch.manual_seed(0)
model = nn.Linear(6, 6, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.78)
x = torch.randn(64, 6)
for step in range(STEPS):
    loss = (model(x) - 0.5 * x).square().sum(1).mean()  # the largest curvature is 2.83
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4g}")
