"""Currents of 1e-9 A in BF16 autocast: BF16 has FP32's range, so nothing is lost before the norm."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3240)


class Sensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(10, 48, bias=False), nn.LayerNorm(48, eps=1e-30)
        self.second = nn.Linear(48, 4)

    def forward(self, x):
        return self.second(F.gelu(self.norm(self.first(x))))


model, centres = Sensor(), torch.randn(4, 10)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(60):
    y = torch.randint(0, 4, (64,))
    current = 1e-9 * (centres[y] + 0.7 * torch.randn(64, 10))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(current)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
