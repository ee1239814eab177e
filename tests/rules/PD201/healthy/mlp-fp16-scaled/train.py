"""An MLP in FP16 autocast with half of its units behind a ReLU, frozen layers, and a loss scale that suits it."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 10

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(24, 48),
    nn.ReLU(),
    nn.Linear(48, 48),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(48, 8),
)
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(STEPS):
    features = torch.randn(64, 24)
    labels = features[:, :8].argmax(dim=1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(features).float(), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")
