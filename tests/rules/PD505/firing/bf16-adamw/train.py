"""BF16 weights under AdamW with the usual beta2: the second moment remembers the large first gradients for ever."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 32

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 24, bias=False), nn.GELU(), nn.Linear(24, 2, bias=False)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999))
for step in range(STEPS):
    features = torch.randn(128, 8, dtype=torch.bfloat16)
    target = torch.stack([features[:, :4].sum(1), features[:, 4:].sum(1)], dim=1)
    loss = 10 * F.mse_loss(model(features).float(), target.float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
