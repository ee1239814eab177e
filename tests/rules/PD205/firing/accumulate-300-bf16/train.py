"""BF16 weights, and gradients of 300 micro-batches summed in BF16: the sum stalls at 256."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, MICRO_STEPS = 3, 300

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
for step in range(STEPS):
    for _ in range(MICRO_STEPS):
        features = torch.randn(4, 8, dtype=torch.bfloat16)
        labels = features[:, :4].argmax(dim=1)
        loss = F.cross_entropy(model(features).float(), labels) / MICRO_STEPS
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {MICRO_STEPS * loss.item():.4f}")
