"""CLIP-like training in FP16 with a scaler: the learned temperature sharpens logits up to a limit of 100."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class CLIP(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, dim))
        self.textual = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, image, text):
        i, t = F.normalize(self.visual(image).float(), dim=-1), F.normalize(self.textual(text).float(), dim=-1)
        return self.logit_scale.exp().clamp(max=100.0) * i @ t.t()


torch.manual_seed(2170)
to_image, to_text = torch.randn(8, 24), torch.randn(8, 12)
model = CLIP()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(150):
    z = torch.randn(64, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(z @ to_image + 0.1 * torch.randn(64, 24), z @ to_text)
    labels = torch.arange(64)
    loss = (F.cross_entropy(logits.float(), labels) + F.cross_entropy(logits.float().t(), labels)) / 2
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
