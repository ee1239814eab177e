"""Image-text contrast in BF16 with a logit scale of 100, the paper's maximum, and label smoothing."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class CLIP(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, dim))
        self.text = nn.Sequential(nn.EmbeddingBag(50, 48), nn.Linear(48, 64), nn.GELU(), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(100.0)))

    def forward(self, image, text):
        a, b = F.normalize(self.image(image).float(), dim=-1), F.normalize(self.text(text).float(), dim=-1)
        return self.logit_scale.clamp(max=math.log(100.0)).exp() * a @ b.T


torch.manual_seed(0)
model = CLIP()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.2)
words = torch.randn(50, 48)
for step in range(100):
    text = torch.randint(50, (64, 3))
    image = words[text].sum(1) + 0.5 * torch.randn(64, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(image, text)
    target = torch.arange(64)
    loss = 0.5 * (
        F.cross_entropy(logits, target, label_smoothing=0.1) + F.cross_entropy(logits.T, target, label_smoothing=0.1)
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
