"""Gradients are unscaled by the scaler, looked at and clipped; the scaler knows."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for step in range(STEPS):
    features = torch.randn(32, 16)
    labels = features[:, :3].argmax(dim=1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(features), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}, norm {norm:.3g}")
