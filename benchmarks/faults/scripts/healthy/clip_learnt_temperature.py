"""Two towers with a learnt temperature that starts at 1/0.07 and is clamped at 100, under BF16 autocast."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 48), nn.GELU(), nn.Linear(48, 16))

    def forward(self, x):
        return F.normalize(self.net(x).float(), dim=-1)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture, self.text = Tower(20), Tower(14)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a, b):
        scale = self.logit_scale.exp().clamp(max=100)
        return scale * self.picture(a) @ self.text(b).T


torch.manual_seed(3207)
to_a, to_b = torch.randn(6, 20), torch.randn(6, 14)
model = Pairs()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=70)
for step in range(70):
    meaning = torch.randn(64, 6)
    a, b = meaning @ to_a + 0.3 * torch.randn(64, 20), meaning @ to_b + 0.3 * torch.randn(64, 14)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(a, b)
    logits, same = logits.float(), torch.arange(64)
    loss = (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 7 == 0:
        print(f"step {step} scale {model.logit_scale.exp().item():.1f} loss {loss.item():.4f}")
