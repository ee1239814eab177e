"""A student and the moving average of its weights, kept in BF16: its gains stand still."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

STEPS, DECAY = 12, 0.999


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 6))
        self.teacher = copy.deepcopy(self.student).to(torch.bfloat16).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x.to(torch.bfloat16)).float()
        return F.mse_loss(self.student(x + 0.1 * torch.randn_like(x)), target.roll(1, dims=0))

    @torch.no_grad()
    def average(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast.to(slow.dtype), 1 - DECAY)


torch.manual_seed(0)
model = Distilled()
optimizer = torch.optim.SGD(model.student.parameters(), lr=0.05)
for step in range(STEPS):
    loss = model(torch.randn(64, 8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.average()
    print(f"step {step}: loss {loss.item():.4f}")
