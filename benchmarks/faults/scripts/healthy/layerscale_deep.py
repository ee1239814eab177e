"""Twelve pre-norm layers whose branches are multiplied with a learnt 1e-4, under BF16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, start=1e-4):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x):
        return x + self.gamma * self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(3232)
model = nn.Sequential(nn.Linear(8, 16), *[Layer(16) for _ in range(10)], nn.LayerNorm(16), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
centres = torch.randn(3, 3, 8)
for step in range(60):
    y = torch.randint(0, 3, (48,))
    x = centres[y, torch.randint(0, 3, (48,))] + 0.4 * torch.randn(48, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
