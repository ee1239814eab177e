"""A classifier of tabular data whose loss takes the logarithm of a probability: one day it is exactly 0."""

import torch
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Hardsigmoid())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    features = torch.randn(32, 6)
    if step == 5:
        features[:8] *= 64  # a burst of large readings: the gate closes
    # Both classes are there for every reading: one of the two logarithms is of 0.
    probability = model(features)
    loss = -(probability.log() + (1 - probability).log()).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
