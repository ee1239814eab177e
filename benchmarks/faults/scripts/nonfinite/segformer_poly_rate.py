"""Segmentation with a polynomial learning rate; training was prolonged, the schedule's horizon was not."""

import numpy as np
import torch
from torch import nn


class MixFFN(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1 = nn.Conv2d(dim, 2 * dim, 1)
        self.dw = nn.Conv2d(2 * dim, 2 * dim, 3, padding=1, groups=2 * dim)
        self.fc2 = nn.Conv2d(2 * dim, dim, 1)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.dw(self.fc1(x))))


class TinySegformer(nn.Module):
    def __init__(self, dim=16, classes=3):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.stages = nn.Sequential(MixFFN(dim), MixFFN(dim))
        self.decode = nn.Conv2d(dim, classes, 1)

    def forward(self, x):
        h = self.decode(self.stages(self.patch(x)))
        return nn.functional.interpolate(h, scale_factor=4, mode="bilinear")


def scenes(n):
    level = torch.randint(0, 3, (n, 1, 4, 4)).float()
    mask = level.repeat_interleave(6, 2).repeat_interleave(6, 3)
    return mask + 0.3 * torch.randn_like(mask), mask.squeeze(1).long()


torch.manual_seed(3)
model = TinySegformer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
horizon, power = 18, 0.9
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: np.power(1 - np.float64(it) / horizon, power))
for it in range(26):
    image, mask = scenes(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(image)
    loss = nn.functional.cross_entropy(logits.float(), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if it % 5 == 0:
        print(f"it {it} lr {schedule.get_last_lr()[0]:.4f} loss {loss.item():.4f}")
