"""An MLP mixer in BF16, weights included, is tuned further with a rate of 2e-5."""

import torch
import torch.nn.functional as F
from torch import nn


class MixerBlock(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 16), nn.GELU(), nn.Linear(16, patches))
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, patches=8, width=16, classes=4):
        super().__init__()
        self.patch = nn.Linear(6, width)
        self.blocks = nn.Sequential(MixerBlock(patches, width), MixerBlock(patches, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.patch(x)).mean(1))


torch.manual_seed(3131)
prototypes = torch.randn(4, 8, 6)
model = Mixer().to(torch.bfloat16)
with torch.no_grad():  # the scale that a long pre-training leaves
    for p in model.parameters():
        if p.dim() > 1:
            p.mul_(2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
for step in range(150):
    y = torch.randint(0, 4, (32,))
    x = prototypes[y] + 0.5 * torch.randn(32, 8, 6)
    loss = F.cross_entropy(model(x.to(torch.bfloat16)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print(f"step {step + 1:3d} loss {loss.item():.4f}")
