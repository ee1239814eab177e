"""FP16 autocast with a loss scaler, as it should be; the loss is computed in FP32."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(STEPS):
    features = torch.randn(32, 16)
    labels = features[:, :3].argmax(dim=1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(features).float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
