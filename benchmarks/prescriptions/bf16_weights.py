"""BF16 weights without a wider copy: updates of 1e-4 of a weight are below half an ulp and do nothing."""

import torch
from torch import nn

torch.manual_seed(0)
STEPS = 96
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _step in range(STEPS):
    x = torch.randn(256, 32)
    loss = nn.functional.mse_loss(model(x.bfloat16()).float(), x[:, :8].square())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4g}")
