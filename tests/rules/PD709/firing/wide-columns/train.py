"""FP16 autocast over columns in their raw units: the first layer comes near 65504, the norm behind it hides that."""

import torch
import torch.nn.functional as F
from torch import nn

COLUMNS, STEPS = 16, 12
UNIT = 7000.0

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(COLUMNS, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
nn.init.orthogonal_(model[0].weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(STEPS):
    columns = torch.randn(128, COLUMNS)
    target = columns.mean(dim=1, keepdim=True)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(columns * UNIT)
    loss = F.mse_loss(predicted.float(), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
