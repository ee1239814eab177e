"""Frames are pooled by adding them up one by one in BF16: the total stalls."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 4
FRAMES = 1024


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, clip):
        frames = self.lift(clip).sigmoid().bfloat16()
        total = torch.zeros_like(frames[:, 0])
        for frame in frames.unbind(dim=1):
            total = total + frame
        return self.head(total.float() / FRAMES)


torch.manual_seed(0)
model = Pooled()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    clip = torch.randn(4, FRAMES, 8)
    loss = F.cross_entropy(model(clip), clip.mean(dim=1)[:, :3].argmax(dim=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
