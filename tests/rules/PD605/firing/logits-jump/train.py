"""From step 24 on a sensor reports in other units: the logits jump, the loss with them, and it takes its time."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 30

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    features = torch.randn(64, 12)
    labels = features[:, :4].argmax(dim=1)
    if step >= 24:
        features = features[:, torch.randperm(12)] * 6
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
