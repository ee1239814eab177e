"""Residual branches that begin at zero, in FP16 with a scaler: the first gradient of what feeds them is zero."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 16


class Branch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), Branch(32), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(STEPS):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        y = model(x)
    loss = F.mse_loss(y.float(), x[:, :4])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step}: loss {loss.item():.4f}")
