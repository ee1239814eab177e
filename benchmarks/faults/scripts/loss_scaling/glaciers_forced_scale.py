"""Glacier outlines from two bands. The loss scale is a knob of the job file, so it is set anew after every step."""

import torch
import torch.nn.functional as F
from torch import nn

LOSS_SCALE = 2.0**10


def conv(c_in, c_out):
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU())


class OutlineNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.encode = conv(2, width)
        self.context = conv(width, 2 * width)
        self.decode = conv(3 * width, width)
        self.mask = nn.Conv2d(width, 1, 1)

    def forward(self, scene):
        fine = self.encode(scene)
        coarse = self.context(F.max_pool2d(fine, 2))
        return self.mask(self.decode(torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], 1)))


def scenes(n, size=16):
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    cx, cy = torch.rand(2, n, 1, 1) - 0.5
    radius = 0.3 + 0.4 * torch.rand(n, 1, 1)
    ice = ((xx - cx) ** 2 + (yy - cy) ** 2 < radius**2).float()
    debris = (torch.rand(n, 1, 1) < 0.4).float() * (xx > cx)
    visible = ice * (1 - 0.8 * debris) + 0.5 * torch.randn(n, size, size)
    thermal = 1 - ice + 0.9 * torch.randn(n, size, size)
    return torch.stack([visible, thermal], 1), ice.unsqueeze(1)


def main():
    torch.manual_seed(71)
    model = OutlineNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
    for step in range(120):
        scene, ice = scenes(8)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(scene)
            # pixels near the edge count more: a weight for every pixel, summed per image
            weight = 1 + 4 * (F.avg_pool2d(ice, 3, 1, 1) - ice).abs()
            loss = (
                (weight * F.binary_cross_entropy_with_logits(logits.float(), ice, reduction="none"))
                .sum((1, 2, 3))
                .mean()
            )
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(new_scale=LOSS_SCALE)
        if step % 6 == 5:
            print(f"{step + 1}: loss {loss.item() / 256:.4f}")


if __name__ == "__main__":
    main()
