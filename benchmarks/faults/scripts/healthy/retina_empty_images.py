"""RetinaNet-like detector: images without any object, extreme imbalance, a prior of 0.01, FP16 with a scaler."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class RetinaNet(nn.Module):
    def __init__(self, num_classes=3, prior=0.01):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2, 1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, 2, 1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
        )
        self.cls_subnet = nn.Sequential(
            nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, num_classes, 3, padding=1)
        )
        self.box_subnet = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 4, 3, padding=1))
        nn.init.constant_(self.cls_subnet[-1].bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        f = self.body(x)
        return self.cls_subnet(f).permute(0, 2, 3, 1).flatten(1, 2), self.box_subnet(f).permute(0, 2, 3, 1).flatten(
            1, 2
        )


def sigmoid_focal_loss(logits, targets, alpha=0.25, gamma=2.0):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    return (alpha * targets + (1 - alpha) * (1 - targets)) * ce * (1 - p_t) ** gamma


def losses(cls_logits, box_pred, gt_class, gt_box):
    positive = gt_class >= 0
    num_pos = int(positive.sum())
    onehot = torch.zeros_like(cls_logits)
    onehot[positive, gt_class[positive]] = 1.0
    loss_cls = sigmoid_focal_loss(cls_logits, onehot).sum() / max(1, num_pos)
    loss_box = F.smooth_l1_loss(box_pred[positive], gt_box[positive], beta=0.11, reduction="sum") / max(1, num_pos)
    return {"loss_cls": loss_cls, "loss_box_reg": loss_box}


def images(n, cells, g):
    size = cells * 4
    x = torch.rand(n, 3, size, size, generator=g) * 0.3
    gt_class = torch.full((n, cells * cells), -1)
    gt_box = torch.full((n, cells * cells, 4), float("nan"))  # anchors without an object have no box
    for i in range(n):
        if torch.rand((), generator=g) < 0.6:
            continue
        c = int(torch.randint(3, (), generator=g))
        a, b = torch.randint(1, cells - 1, (2,), generator=g).tolist()
        x[i, c, a * 4 - 2 : a * 4 + 6, b * 4 - 2 : b * 4 + 6] += 0.7
        gt_class[i, a * cells + b] = c
        gt_box[i, a * cells + b] = torch.tensor([0.1, -0.1, 0.7, 0.7])
    return x, gt_class, gt_box


def main():
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(60)
    model = RetinaNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=15)
    empty = 0
    for i in range(48):
        x, gt_class, gt_box = images(3, 8, g)
        empty += not bool((gt_class >= 0).any())
        with torch.autocast("cpu", dtype=torch.float16):
            cls_logits, box_pred = model(x)
        loss_dict = losses(cls_logits.float(), box_pred.float(), gt_class, gt_box)
        loss = sum(loss_dict.values())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if i % 8 == 0:
            print(
                i,
                {k: round(v.item(), 4) for k, v in loss_dict.items()},
                "empty so far",
                empty,
                "scale",
                scaler.get_scale(),
            )


if __name__ == "__main__":
    main()
