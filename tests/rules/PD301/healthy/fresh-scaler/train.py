"""A fresh scaler that starts at 2^40, halves until it finds its level, and then probes upwards every eight steps."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 48

torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=8)
for step in range(STEPS):
    labels = torch.randint(4, (16,))
    signal = torch.randn(16, 1, 16) + labels.view(-1, 1, 1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(signal).float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step % 8 == 0:
        print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")
