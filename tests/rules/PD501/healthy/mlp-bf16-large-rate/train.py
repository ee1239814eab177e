"""BF16 weights at a learning rate they can follow, with warm-up, a frozen layer and norm gains that start at 1."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 12

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(12, 32),
    nn.LayerNorm(32),
    nn.GELU(),
    nn.Linear(32, 32),
    nn.GELU(),
    nn.Linear(32, 6),
).bfloat16()
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 24))
for step in range(STEPS):
    features = torch.randn(32, 12, dtype=torch.bfloat16)
    labels = features[:, :6].argmax(dim=1)
    loss = F.cross_entropy(model(features).float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step}: loss {loss.item():.4f}")
