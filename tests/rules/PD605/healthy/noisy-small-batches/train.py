"""Batches of four and noisy labels: the loss is all over the place, and comes down."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 48

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(STEPS):
    features = torch.randn(4, 12)
    labels = (3 * features[:, :4] + torch.randn(4, 4)).argmax(dim=1)
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
