"""A small detector, FP16 autocast with a GradScaler; cells without an object have NaN boxes, which are never indexed."""

import torch
import torch.nn.functional as F
from torch import nn


class Detector(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, dim, 3, stride=2, padding=1),
            nn.GroupNorm(4, dim),
            nn.ReLU(),
            nn.Conv2d(dim, dim, 3, stride=2, padding=1),
            nn.GroupNorm(4, dim),
            nn.ReLU(),
        )
        self.objectness, self.box = nn.Conv2d(dim, 1, 1), nn.Conv2d(dim, 4, 1)

    def forward(self, image):
        h = self.backbone(image)
        return self.objectness(h).squeeze(1), self.box(h).permute(0, 2, 3, 1)


def scenes(n, size=32):
    image = 0.1 * torch.randn(n, 1, size, size)
    boxes = torch.full((n, size // 4, size // 4, 4), float("nan"))
    for i in range(n):
        for _ in range(int(torch.randint(0, 4, ()))):
            r, c = torch.randint(0, size - 8, (2,)).tolist()
            h, w = torch.randint(3, 8, (2,)).tolist()
            image[i, 0, r : r + h, c : c + w] += 1.0
            boxes[i, (r + h // 2) // 4, (c + w // 2) // 4] = torch.tensor([r % 4, c % 4, h, w]) / 4.0
    return image, boxes


torch.manual_seed(74)
model = Detector()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", growth_interval=25)
for step in range(60):
    image, boxes = scenes(8)
    with torch.autocast("cpu", dtype=torch.float16):
        objectness, box = model(image)
    there = ~boxes.isnan().any(-1)
    loss = F.binary_cross_entropy_with_logits(objectness.float(), there.float(), pos_weight=torch.tensor(8.0))
    loss = loss + F.l1_loss(box.float()[there], boxes[there])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} norm {norm.item():.2f} mean size {boxes.nanmean().item():.2f}")
