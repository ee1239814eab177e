"""A GradScaler left over from FP16 in a BF16 run."""

import torch
from torch import nn

torch.manual_seed(0)
STEPS = 64
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for _step in range(STEPS):
    x = torch.randn(64, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), x[:, :8].square())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"loss {loss.item():.4f}")
