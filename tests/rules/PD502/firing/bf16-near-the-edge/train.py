"""BF16 weights at a learning rate they can just follow; a tenth of it, where the schedule ends, they cannot."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 6)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.0)
for step in range(STEPS):
    features = torch.randn(32, 12, dtype=torch.bfloat16)
    labels = features[:, :6].argmax(dim=1)
    loss = F.cross_entropy(model(features).float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
