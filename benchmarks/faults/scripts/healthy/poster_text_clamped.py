"""Posters and their texts: contrastive training with a learned temperature that stays within its usual limit."""

import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3100)
D = 16
mix_poster, mix_text = torch.randn(10, 24) / 3, torch.randn(10, 18) / 3


def pairs(n):
    z = torch.randn(n, 10)
    return z @ mix_poster + 0.05 * torch.randn(n, 24), z @ mix_text + 0.05 * torch.randn(n, 18)


class Tower(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.inp, self.norm = nn.Linear(n_in, 64), nn.LayerNorm(64)
        self.mid, self.out = nn.Linear(64, 64), nn.Linear(64, D)

    def forward(self, x):
        return F.normalize(self.out(F.gelu(self.mid(F.gelu(self.norm(self.inp(x)))))), dim=-1)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.poster, self.text = Tower(24), Tower(18)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, poster, text):
        return self.log_scale.exp() * self.poster(poster) @ self.text(text).T


model = Matcher()
temperature = [model.log_scale]
towers = [p for p in model.parameters() if p is not model.log_scale]
optimizer = torch.optim.AdamW(
    [{"params": towers, "lr": 2e-3}, {"params": temperature, "lr": 1.5e-1, "weight_decay": 0}]
)
target = torch.arange(96)
for step in range(500):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(*pairs(96))
    scores = scores.float()
    loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.log_scale.clamp_(max=math.log(100))
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.4f} largest score {scores.abs().max().item():.0f}")
