"""A CNN in FP16 autocast with a loss scale kept by hand: it is raised every second step, and nothing checks for Inf."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 10

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scale = 256.0
for step in range(STEPS):
    images, labels = torch.randn(12, 1, 8, 8), torch.randint(6, (12,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(images).float(), labels)
    (loss * scale).backward()
    for parameter in model.parameters():
        parameter.grad /= scale
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 1:
        scale *= 128
    print(f"step {step}: loss {loss.item():.4f}")
