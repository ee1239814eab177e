"""Twelve layers with ReLUs and an initialisation to match: the gradient keeps its size along them."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, WIDTH, DEPTH = 6, 20, 12

torch.manual_seed(0)
tower = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
for layer in tower[::2]:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
model = nn.Sequential(*tower, nn.Linear(WIDTH, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(STEPS):
    features = torch.randn(32, WIDTH)
    loss = F.cross_entropy(model(features), features[:, :3].argmax(dim=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
