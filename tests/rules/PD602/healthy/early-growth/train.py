"""Logits that grow tenfold in the first steps and level off, and large activations that do not grow, in FP16."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 48

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
with torch.no_grad():
    model[0].weight *= 400.0
    model[2].weight *= 0.001
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
for step in range(STEPS):
    features = 4 * torch.randn(64, 12)
    labels = features[:, :4].argmax(dim=1)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(features)
    loss = F.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f} logits {logits.abs().max().item():.1f}")
