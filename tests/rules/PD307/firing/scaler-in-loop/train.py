"""The loss scaler is made anew for every batch: what it learns from an overflow is thrown away with it."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 12

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    features = torch.randn(32, 16)
    labels = features[:, :3].argmax(dim=1)
    weight = 50.0 if step in (7, 9) else 1.0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = weight * F.cross_entropy(model(features), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
