"""Rows are pruned and then normalised to unit length: the length of a pruned row is 0."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 9

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(STEPS):
    features, labels = torch.randn(16, 10), torch.randint(4, (16,))
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        weight = model[0].weight
        if step == 5:
            weight[3] = 0.0
        weight /= weight.norm(dim=1, keepdim=True)
    print(f"step {step}: loss {loss.item():.4f}")
