"""The same gradients under a scale that starts high enough."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 10

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 3, 3, padding=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step in range(STEPS):
    images = torch.randn(4, 3, 24, 24)
    with torch.autocast("cpu", dtype=torch.float16):
        restored = model(images + 0.3 * torch.randn_like(images))
    loss = 0.2 * F.mse_loss(restored.float(), images)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")
