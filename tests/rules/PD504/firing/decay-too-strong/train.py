"""A weight decay meant for another learning rate: AdamW takes half of every weight away on each step."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 14

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, weight_decay=1.5)
for step in range(STEPS):
    features = torch.randn(32, 24)
    labels = torch.randint(4, (32,))
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
