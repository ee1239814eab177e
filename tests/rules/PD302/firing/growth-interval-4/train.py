"""A growth interval of four steps: the scaler spends its time running into the same ceiling."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 36

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
for step in range(STEPS):
    features = torch.randn(32, 16)
    labels = features[:, :3].argmax(dim=1)
    weight = 4.0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = weight * F.cross_entropy(model(features), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f} scale {scaler.get_scale():g}")
