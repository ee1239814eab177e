"""Matches sketches with photos: InfoNCE at a fixed temperature of 0.02, logits of up to 50, in BF16 autocast."""

import torch
import torch.nn as nn
import torch.nn.functional as F

TEMPERATURE = 0.02


class Tower(nn.Module):
    def __init__(self, features, dim=32):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(features, 64), nn.Linear(64, dim)

    def forward(self, x):
        return F.normalize(self.fc2(F.gelu(self.fc1(x))).float(), dim=-1)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.sketch, self.photo = Tower(20), Tower(40)

    def forward(self, sketch, photo):
        return self.sketch(sketch), self.photo(photo)


def pairs(n):
    thing = torch.randn(n, 12)
    return thing @ to_sketch + 0.2 * torch.randn(n, 20), thing @ to_photo + 0.2 * torch.randn(n, 40)


torch.manual_seed(2007)
to_sketch, to_photo = torch.randn(12, 20), torch.randn(12, 40)
model = Matcher()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
for step in range(140):
    sketch, photo = pairs(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = model(sketch, photo)
    logits = a @ b.T / TEMPERATURE
    target = torch.arange(64)
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
