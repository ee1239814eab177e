"""Fine-tunes a box head on aerial crops: one vehicle per crop, logarithmic IoU plus an objectness term."""

import torch
from torch import nn


class IoULoss(nn.Module):
    """Minus the logarithm of the overlap of boxes given as x1, y1, x2, y2."""

    def forward(self, boxes, target):
        low = torch.maximum(boxes[:, :2], target[:, :2])
        high = torch.minimum(boxes[:, 2:], target[:, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
        area_target = (target[:, 2:] - target[:, :2]).prod(-1)
        iou = shared / (area + area_target - shared)
        return -torch.log(iou).mean()


class Backbone(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stages = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.SiLU(),
        )

    def forward(self, x):
        return self.stages(x).flatten(1)


class Detector(nn.Module):
    def __init__(self, size=24, width=16):
        super().__init__()
        self.backbone = Backbone(width)
        features = 2 * width * (size // 4) ** 2
        self.box = nn.Sequential(nn.Linear(features, 64), nn.SiLU(), nn.Linear(64, 4))
        self.objectness = nn.Linear(features, 1)

    def forward(self, x):
        h = self.backbone(x)
        centre, extent = self.box(h).sigmoid().chunk(2, -1)
        extent = 0.05 + 0.5 * extent
        return torch.cat([centre - extent / 2, centre + extent / 2], -1), self.objectness(h).squeeze(-1)


def crops(n, generator, size=24):
    """Mostly centred vehicles; the tracker sometimes loses one towards the border of its crop."""
    centre = 0.5 + 0.13 * torch.randn(n, 2, generator=generator)
    extent = 0.2 + 0.2 * torch.rand(n, 2, generator=generator)
    boxes = torch.cat([centre - extent / 2, centre + extent / 2], -1).clamp(0, 1)
    grid = (torch.arange(size) + 0.5) / size
    inside_x = (grid > boxes[:, :1]) & (grid < boxes[:, 2:3])
    inside_y = (grid > boxes[:, 1:2]) & (grid < boxes[:, 3:4])
    image = (inside_y[:, :, None] & inside_x[:, None, :]).float()
    return image[:, None] + 0.2 * torch.randn(n, 1, size, size, generator=generator), boxes


class Trainer:
    def __init__(self, model, lr=0.02):
        self.model = model
        self.box_loss, self.objectness_loss = IoULoss(), nn.BCEWithLogitsLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.skipped = 0

    def step(self, images, boxes):
        predicted, score = self.model(images)
        loss = self.box_loss(predicted, boxes) + 0.2 * self.objectness_loss(score, torch.ones_like(score))
        self.optimizer.zero_grad()
        loss.backward()  # on every worker, or the reduction of the gradients waits for ever
        if not loss.isfinite():
            self.skipped += 1
            return None
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        return loss.item()

    def fit(self, loader):
        for index, (images, boxes) in enumerate(loader):
            loss = self.step(images, boxes)
            if loss is None:
                print(f"batch {index}: skipped ({self.skipped} so far)")
                continue
            if index % 10 == 0:
                print(f"batch {index}: loss {loss:.4f}")


if __name__ == "__main__":
    torch.manual_seed(12)
    generator = torch.Generator().manual_seed(17)
    Trainer(Detector()).fit([crops(16, generator) for _ in range(60)])
