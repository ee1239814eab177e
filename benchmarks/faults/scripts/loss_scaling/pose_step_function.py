"""Keypoint heatmaps in FP16; everything a step needs was moved into one function, the scaler too."""

import torch
from torch import nn


class Hourglass(nn.Module):
    def __init__(self, width=12, joints=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.heat = nn.Conv2d(width, joints, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.heat(x + self.body(x))


def figures(n):
    rows, cols = torch.randint(2, 14, (2, n, 3))
    grid = torch.arange(16)
    heat = torch.exp(-((grid[:, None] - rows[..., None, None]) ** 2 + (grid - cols[..., None, None]) ** 2) / 4)
    image = nn.functional.interpolate(
        (heat * torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)).sum(1, keepdim=True), scale_factor=2.0
    )
    return image + 0.05 * torch.randn_like(image), heat


def train_step(model, optimizer, image, heat):
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(image)
        loss = 0.5 * (predicted.float() - heat).square().sum((2, 3)).mean()
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


torch.manual_seed(0)
model = Hourglass()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(50):
    loss = train_step(model, optimizer, *figures(8))
    if step % 2 == 0:
        print(f"step {step}: loss {loss:.4f}")
