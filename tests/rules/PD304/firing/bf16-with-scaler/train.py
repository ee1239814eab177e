"""A script that moved from FP16 to BF16 and took its loss scaler along."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(STEPS):
    features = torch.randn(32, 16)
    labels = features[:, :3].argmax(dim=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(features).float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
