"""Outlines roofs in BF16 autocast; an FP32 average with decay 0.999 is what is reported, so that its loss lags far behind."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class RoofNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1, self.gn1 = nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width)
        self.conv2, self.gn2 = nn.Conv2d(width, width, 3, padding=2, dilation=2), nn.GroupNorm(4, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        x = F.silu(self.gn1(self.conv1(x)))
        x = F.silu(self.gn2(self.conv2(x)))
        return self.out(x)


def tiles(n, size=16):
    x, y = 0.5 * torch.randn(n, 3, size, size), torch.zeros(n, 1, size, size)
    for i in range(n):
        r, c = torch.randint(0, size - 7, (2,)).tolist()
        y[i, :, r : r + 7, c : c + 7] = 1
    return x + y * torch.tensor([0.8, -0.4, 0.2]).view(1, 3, 1, 1), y


torch.manual_seed(909)
model = RoofNet()
shadow = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(120):
    x, y = tiles(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = F.binary_cross_entropy_with_logits(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for s, p in zip(shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - 0.999)
    if step % 4 == 0:
        with torch.no_grad():
            lagging = F.binary_cross_entropy_with_logits(shadow(x), y)
        print(f"step {step} loss {loss.item():.4f} shadow {lagging.item():.4f}")
