"""Fraud, one case in fifty, with positive weights; FP16 autocast, a GradScaler with its defaults and clipping after unscale_."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3222)
model = nn.Sequential(nn.Linear(14, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
nn.init.constant_(model[-1].bias, -3.9)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
direction = torch.randn(14) / 14**0.5


def payments(n):
    x = torch.randn(n, 14)
    return x, (x @ direction > 2.0).to(x.dtype)


for step in range(60):
    x, y = payments(256)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x).squeeze(1)
    loss = F.binary_cross_entropy_with_logits(logits.float(), y, pos_weight=torch.tensor(10.0))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 6 == 0:
        print(f"step {step} scale {scaler.get_scale():g} loss {loss.item():.4f}")
