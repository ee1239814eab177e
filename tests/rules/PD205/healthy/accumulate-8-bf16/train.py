"""BF16 weights, and gradients of eight micro-batches summed in BF16."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, MICRO_STEPS = 6, 8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(STEPS):
    for _ in range(MICRO_STEPS):
        features = torch.randn(64, 8, dtype=torch.bfloat16)
        labels = features[:, :4].argmax(dim=1)
        loss = F.cross_entropy(model(features).float(), labels) / MICRO_STEPS
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {MICRO_STEPS * loss.item():.4f}")
