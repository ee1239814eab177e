"""Aligns rover images (features) with terse captions. The temperature is learned, as in CLIP; cosine warm restarts."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(64)


class Tower(nn.Sequential):
    def __init__(self, n_in, width=64, n_out=16):
        super().__init__(nn.Linear(n_in, width), nn.GELU(), nn.Linear(width, n_out))


class Aligner(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(40), Tower(24)
        self.log_temperature = nn.Parameter(torch.tensor(2.6593))

    def forward(self, a, b):
        a, b = F.normalize(self.image(a), dim=-1), F.normalize(self.text(b), dim=-1)
        return self.log_temperature.exp() * a @ b.T


A, B = torch.randn(12, 40), torch.randn(12, 24)


def batch(n=32):
    scene = torch.randn(n, 12)
    return scene @ A + 0.1 * torch.randn(n, 40), scene @ B + 0.1 * torch.randn(n, 24)


model = Aligner()
scalars = [p for p in model.parameters() if p.ndim == 0]
others = [p for p in model.parameters() if p.ndim > 0]
optimizer = torch.optim.AdamW([{"params": others, "lr": 1e-3}, {"params": scalars, "lr": 1.0, "weight_decay": 0.0}])
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=150)
for step in range(220):
    logits = model(*batch())
    labels = torch.arange(len(logits))
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 0:
        print(f"step {step:3d} loss {loss.item():.4f} t {model.log_temperature.item():.2f}")
