"""FP16 autocast, no loss scaler, and a mean with a small weight: its gradient dies at the cast behind the loss."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 12

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x = torch.randn(128, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        y = model(x)
    loss = 1e-6 * F.mse_loss(y.float(), x[:, :8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4e}")
