"""Inputs are centred by a running mean of batches; the BF16 count of them stops at 256."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 300


class Centre(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.bfloat16))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        with torch.no_grad():
            self.count += 1
            self.mean += (x.mean(0) - self.mean) / self.count.float()
        return x - self.mean


torch.manual_seed(0)
model = nn.Sequential(Centre(4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x = 0.5 + torch.randn(32, 4)
    loss = F.mse_loss(model(x).squeeze(-1), x[:, 0] - x[:, 1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
