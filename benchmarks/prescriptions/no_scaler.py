"""FP16 autocast without a loss scaler: much of the gradient is too small for FP16 and is flushed to zero."""

import torch
from torch import nn

torch.manual_seed(0)
STEPS, ROWS = 96, 4096
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _step in range(STEPS):
    x = torch.randn(ROWS, 32)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = 1e-2 * nn.functional.mse_loss(out.float(), x[:, :8])  # a mean over 32768 outputs, one of several terms
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4g}")
