"""A sum in place of a mean: a fresh GradScaler comes down many times, to a level where every gradient lives."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 32

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(STEPS):
    x = torch.randn(512, 32)
    with torch.autocast("cpu", dtype=torch.float16):
        y = model(x)
    loss = 10.0 * F.mse_loss(y.float(), x[:, :16], reduction="sum")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step}: scale {scaler.get_scale():g}")
