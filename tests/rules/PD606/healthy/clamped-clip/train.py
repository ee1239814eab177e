"""A contrastive model whose temperature is annealed until its clamp holds it: logits of 100 are the design."""

import math

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 64


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 32), nn.Linear(12, 32)
        self.register_buffer("log_scale", torch.tensor(math.log(1 / 0.07)))

    def forward(self, a, b):
        a, b = F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1)
        return a @ b.T * self.log_scale.exp().clamp(max=100.0)


torch.manual_seed(0)
model, mixing = Contrastive(), torch.randn(16, 12)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    a = torch.randn(32, 16)
    logits = model(a, a @ mixing + torch.randn(32, 12))
    loss = (F.cross_entropy(logits, torch.arange(32)) + F.cross_entropy(logits.T, torch.arange(32))) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.log_scale += 0.06
    print(f"step {step}: loss {loss.item():.4f} scale {min(100.0, model.log_scale.exp().item()):.1f}")
