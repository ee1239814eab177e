"""Feed-forward style transfer with Gram matrices, FP16 autocast and a gradient scaler; image size grows at the end."""

import torch
import torch.nn.functional as F
from torch import nn


class Features(nn.Module):
    """Fixed random filters, calibrated to unit responses, in place of a pretrained network."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 16, 3, padding=1)
        with torch.no_grad():
            self.conv1.weight.mul_(6)
            self.conv2.weight.mul_(4)
        self.requires_grad_(False)

    def forward(self, x):
        low = F.relu(self.conv1(x))
        return low, F.relu(self.conv2(low))


class Gram(nn.Module):
    def forward(self, x):
        b, c, h, w = x.shape
        flat = x.reshape(b, c, h * w)
        return torch.bmm(flat, flat.mT) / (c * h * w)


class Perception(nn.Module):
    """What an image shows, and its texture on two levels."""

    def __init__(self):
        super().__init__()
        self.features, self.gram = Features(), Gram()

    def forward(self, image):
        low, high = self.features(image)
        return high.float(), [self.gram(low).float(), self.gram(high).float()]


def style_loss(seen, content, style, weight=20.0):
    shape, texture = seen
    match = sum(F.mse_loss(ours, theirs.expand_as(ours)) for ours, theirs in zip(texture, style, strict=True))
    return F.mse_loss(shape, content[0]) + weight * match


class Transformer(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.down = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.norm = nn.InstanceNorm2d(width, affine=True)
        self.body = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x):
        h = F.relu(self.norm(self.down(x)))
        h = h + F.relu(self.body(h))
        return torch.sigmoid(self.up(F.interpolate(h, scale_factor=2.0)))


def photos(n, size, generator):
    coarse = torch.rand(n, 3, 4, 4, generator=generator)
    image = F.interpolate(coarse, size=(size, size), mode="bilinear")
    return (image + 0.05 * torch.randn(image.shape, generator=generator)).clamp(0, 1)


def poster(size):
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    return torch.stack([((x + y) // 3) % 2, (x // 4) % 2, (y // 2) % 2]).float()[None]


torch.manual_seed(51)
generator = torch.Generator().manual_seed(52)
net, perceive = Transformer(), Perception()
_, style = perceive(poster(16))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
skipped = 0
for step in range(336):
    size = 16 if step < 320 else 96
    content = photos(2, size, generator)
    with torch.autocast("cpu", torch.float16):
        loss = style_loss(perceive(net(content)), perceive(content), style)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if not torch.isfinite(loss):
        skipped += 1
        continue
    scaler.step(optimizer)
    scaler.update()
    if step % 40 == 0:
        print(f"step {step} size {size} loss {loss.item():.4f}")
print(f"finished, {skipped} batches skipped")
