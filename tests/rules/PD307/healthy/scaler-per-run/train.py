"""One scaler for two optimizers that take turns; it backs off once and counts clean steps in between."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 12

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
weights = [p for p in model.parameters() if p.ndim > 1]
biases = [p for p in model.parameters() if p.ndim < 2]
optimizers = [torch.optim.AdamW(weights, lr=1e-3), torch.optim.SGD(biases, lr=1e-2)]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
for step in range(STEPS):
    features = torch.randn(32, 16)
    labels = features[:, :3].argmax(dim=1)
    weight = 50.0 if step == 7 else 1.0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = weight * F.cross_entropy(model(features), labels)
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
