"""Contrastive training with features cached over accum_freq batches; the losses of the passes are added up."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(957)
ACCUM_FREQ, BATCH, LEFT, RIGHT, DIM = 8, 16, 40, 30, 24
to_left, to_right = torch.randn(10, LEFT), torch.randn(10, RIGHT)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(LEFT, 96), nn.GELU(), nn.Linear(96, DIM))
        self.right = nn.Sequential(nn.Linear(RIGHT, 96), nn.GELU(), nn.Linear(96, DIM))

    def forward(self, a, b):
        return F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)


def batch():
    z = torch.randn(BATCH, 10)
    return z @ to_left + torch.randn(BATCH, LEFT), z @ to_right + torch.randn(BATCH, RIGHT)


model = Towers()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
labels = torch.arange(ACCUM_FREQ * BATCH)
for step in range(60):
    batches = [batch() for _ in range(ACCUM_FREQ)]
    with torch.no_grad():
        cached = [model(a, b) for a, b in batches]
    opt.zero_grad()
    for i, (a, b) in enumerate(batches):
        fresh = model(a, b)
        left = torch.cat([fresh[0] if j == i else c[0] for j, c in enumerate(cached)])
        right = torch.cat([fresh[1] if j == i else c[1] for j, c in enumerate(cached)])
        logits = 14.0 * left @ right.t()
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.4f}")
