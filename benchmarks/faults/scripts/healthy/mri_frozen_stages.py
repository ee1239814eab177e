"""Segments scans with a frozen encoder in eval mode; only the decoder learns, and the mask covers 3 % of the pixels."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Stage(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(nn.Conv2d(cin, cout, 3, stride=2, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class LesionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage1, self.stage2 = Stage(1, 16), Stage(16, 32)
        self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.mask = nn.Conv2d(8, 1, 1)
        nn.init.constant_(self.mask.bias, -3.5)

    def train(self, mode=True):
        super().train(mode)
        self.stage1.eval()
        self.stage2.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            a = self.stage1(x)
            b = self.stage2(a)
        u = F.relu(self.up1(b))
        return self.mask(F.relu(self.up2(torch.cat([u, a], 1))))


def scans(n, size=24):
    x = 0.3 * torch.randn(n, 1, size, size)
    y = torch.zeros(n, 1, size, size)
    for i in range(n):
        if i % 3:
            r, c = torch.randint(0, size - 5, (2,)).tolist()
            y[i, :, r : r + 5, c : c + 5] = 1
    return x + 2 * y, y


torch.manual_seed(33)
model = LesionNet()
for p in [*model.stage1.parameters(), *model.stage2.parameters()]:
    p.requires_grad_(False)
model.train()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
for step in range(120):
    x, y = scans(12)
    logits = model(x)
    probability = logits.sigmoid()
    dice = 1 - (2 * (probability * y).sum() + 1) / (probability.sum() + y.sum() + 1)
    loss = dice + F.binary_cross_entropy_with_logits(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"{step} loss {loss.item():.4f}")
