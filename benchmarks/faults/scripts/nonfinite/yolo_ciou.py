"""One-stage detector with a CIoU loss; ground truth is padded with zeros to the same number of boxes per image."""

import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

MAX_BOXES = 3


def bbox_ciou(boxes1, boxes2):
    """boxes in (x, y, w, h)"""
    b1 = torch.cat([boxes1[..., :2] - boxes1[..., 2:] / 2, boxes1[..., :2] + boxes1[..., 2:] / 2], -1)
    b2 = torch.cat([boxes2[..., :2] - boxes2[..., 2:] / 2, boxes2[..., :2] + boxes2[..., 2:] / 2], -1)
    lt = torch.max(b1[..., :2], b2[..., :2])
    rb = torch.min(b1[..., 2:], b2[..., 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    union = boxes1[..., 2:].prod(-1) + boxes2[..., 2:].prod(-1) - inter
    iou = inter / (union + 1e-6)
    enclose = torch.max(b1[..., 2:], b2[..., 2:]) - torch.min(b1[..., :2], b2[..., :2])
    c2 = enclose.pow(2).sum(-1) + 1e-6
    rho2 = (boxes1[..., :2] - boxes2[..., :2]).pow(2).sum(-1)
    ar_gt = boxes2[..., 2] / boxes2[..., 3]
    ar_pred = boxes1[..., 2] / boxes1[..., 3]
    v = 4 / (math.pi**2) * (torch.atan(ar_gt) - torch.atan(ar_pred)).pow(2)
    with torch.no_grad():
        alpha = v / (1 - iou + v + 1e-6)
    return iou - rho2 / c2 - alpha * v


class TinyYOLO(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = [(3, 8), (8, 16), (16, 32)]
        self.backbone = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.SiLU()) for i, o in cfg]
        )
        self.neck = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.SiLU())
        self.box = nn.Linear(64, MAX_BOXES * 4)
        self.obj = nn.Linear(64, MAX_BOXES)

    def forward(self, x):
        h = self.neck(self.backbone(x))
        box = self.box(h).view(-1, MAX_BOXES, 4)
        xy, wh = box[..., :2].sigmoid(), box[..., 2:].sigmoid() * 0.8 + 0.02
        return torch.cat([xy, wh], -1), self.obj(h)


def compute_loss(pred_boxes, pred_obj, gt_boxes):
    mask = (gt_boxes.sum(-1) > 0).float()
    ciou_loss = ((1 - bbox_ciou(pred_boxes, gt_boxes)) * mask).sum() / mask.sum().clamp(min=1)
    conf_loss = F.binary_cross_entropy_with_logits(pred_obj, mask)
    return ciou_loss, conf_loss


def load_image(rng):
    img = torch.rand(3, 32, 32) * 0.2
    boxes = torch.zeros(MAX_BOXES, 4)
    n = MAX_BOXES if rng.random() < 0.985 else rng.randint(1, MAX_BOXES - 1)
    for i in range(n):
        w, h = rng.uniform(0.15, 0.4), rng.uniform(0.15, 0.4)
        x, y = rng.uniform(w / 2, 1 - w / 2), (i + 0.5) / MAX_BOXES
        boxes[i] = torch.tensor([x, y, w, h])
        img[
            i,
            int((y - h / 2) * 32) if y > h / 2 else 0 : int((y + h / 2) * 32),
            int((x - w / 2) * 32) : int((x + w / 2) * 32),
        ] += 0.7
    return img, boxes


if __name__ == "__main__":
    torch.manual_seed(0)
    rng = random.Random(4)
    model = TinyYOLO()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.937, nesterov=True, weight_decay=5e-4)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    for step in range(40):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, (step + 1) / 10)
        batch = [load_image(rng) for _ in range(4)]
        imgs, gts = torch.stack([b[0] for b in batch]), torch.stack([b[1] for b in batch])
        boxes, obj = model(imgs)
        lbox, lobj = compute_loss(boxes, obj, gts)
        loss = 2.0 * lbox + lobj
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        if step % 5 == 0:
            print(f"{step}: box {lbox.item():.4f} obj {lobj.item():.4f}")
