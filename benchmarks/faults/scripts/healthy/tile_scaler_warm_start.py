"""Land-cover segmentation in FP16 autocast; the gradient scaler starts high and finds its level in the first steps."""

import torch
import torch.nn.functional as F
from torch import nn


class DoubleConv(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(),
        )


class SmallUNet(nn.Module):
    def __init__(self, bands=4, classes=3, width=8):
        super().__init__()
        self.enter = DoubleConv(bands, width)
        self.deep = DoubleConv(width, 2 * width)
        self.leave = DoubleConv(3 * width, width)
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skip = self.enter(x)
        deep = F.interpolate(self.deep(F.max_pool2d(skip, 2)), scale_factor=2.0)
        return self.classify(self.leave(torch.cat([skip, deep], 1)))


class Tiles:
    def __init__(self, seed, size=24):
        self.generator = torch.Generator().manual_seed(seed)
        self.spectra = torch.randn(3, 4, generator=self.generator)
        self.size = size

    def batch(self, n):
        field = torch.randn(n, 3, 4, 4, generator=self.generator)
        label = F.interpolate(field, size=(self.size, self.size), mode="bilinear").argmax(1)
        image = self.spectra[label].permute(0, 3, 1, 2)
        return image + 0.5 * torch.randn(image.shape, generator=self.generator), label


class Trainer:
    def __init__(self):
        self.model = SmallUNet()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
        self.skipped = 0

    def step(self, image, label):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(self.model(image).float(), label)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < before:
            self.skipped += 1
            print(f"step skipped, scale {before:.0f} -> {self.scaler.get_scale():.0f}")
        return loss.item()


torch.manual_seed(111)
tiles, trainer = Tiles(112), Trainer()
for step in range(70):
    loss = trainer.step(*tiles.batch(6))
    if step % 10 == 0:
        print(f"step {step} loss {loss:.4f} scale {trainer.scaler.get_scale():.0f} skipped {trainer.skipped}")
