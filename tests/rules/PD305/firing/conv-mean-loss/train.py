"""FP16 autocast without a loss scaler: gradients of a mean over pixels lie among FP16's subnormal numbers."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.GELU(),
    nn.Conv2d(8, 3, 3, padding=1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    images = torch.randn(4, 3, 64, 64)
    with torch.autocast("cpu", dtype=torch.float16):
        restored = model(images + 0.3 * torch.randn_like(images))
    loss = F.mse_loss(restored.float(), images)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
