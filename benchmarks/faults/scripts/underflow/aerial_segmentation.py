"""Aerial segmentation, FP16 with FP32 master weights and a static loss scale, all by hand (the old apex O2 recipe)."""

import torch
import torch.nn.functional as F
from torch import nn

LOSS_SCALE = 256.0


class DoubleConv(nn.Sequential):
    def __init__(self, cin, cout, stride=1):
        super().__init__(
            nn.Conv2d(cin, cout, 3, stride, 1),
            nn.GroupNorm(4, cout),
            nn.ReLU(),
            nn.Conv2d(cout, cout, 3, 1, 1),
            nn.GroupNorm(4, cout),
            nn.ReLU(),
        )


class Segmenter(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.enc1, self.enc2, self.enc3 = DoubleConv(3, 8), DoubleConv(8, 16, 2), DoubleConv(16, 32, 2)
        self.dec2, self.dec1 = DoubleConv(48, 16), DoubleConv(24, 8)
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(a)
        c = self.enc3(b)
        b = self.dec2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        a = self.dec1(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1))
        return self.head(a)


def tiles(n, size=48):
    label = torch.randint(4, (n, 1, 6, 6)).float()
    label = F.interpolate(label, size=size).long().squeeze(1)
    colours = torch.tensor([[0.1, 0.5, 0.1], [0.5, 0.5, 0.5], [0.1, 0.2, 0.7], [0.7, 0.6, 0.3]])
    return colours[label].permute(0, 3, 1, 2) + 0.1 * torch.randn(n, 3, size, size), label


torch.manual_seed(0)
model = Segmenter().half()
master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.SGD(master, lr=0.2, momentum=0.9)
for step in range(30):
    image, label = tiles(8)
    logits = model(image.half())
    loss = F.cross_entropy(logits.float(), label)
    model.zero_grad()
    (loss / LOSS_SCALE).backward()
    for m, p in zip(master, model.parameters()):
        m.grad = p.grad.float() * LOSS_SCALE
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters()):
            p.copy_(m)
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
