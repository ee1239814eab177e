"""CenterNet on toy images: heatmap, size and offset heads, all of it (the loss too) under FP16 autocast."""

import torch
import torch.nn as nn
import torch.nn.functional as F

STRIDE = 4


def gaussian_focal_loss(pred, gaussian_target, alpha=2.0, gamma=4.0):
    eps = 1e-12
    pos_weights = gaussian_target.eq(1)
    neg_weights = (1 - gaussian_target).pow(gamma)
    pos_loss = -(pred + eps).log() * (1 - pred).pow(alpha) * pos_weights
    neg_loss = -(1 - pred + eps).log() * pred.pow(alpha) * neg_weights
    return pos_loss + neg_loss


class ConvModule(nn.Sequential):
    def __init__(self, cin, cout, stride=1):
        super().__init__(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class CenterNetHead(nn.Module):
    def __init__(self, channels, num_classes):
        super().__init__()
        self.heatmap_head = self._build(channels, num_classes)
        self.wh_head = self._build(channels, 2)
        self.offset_head = self._build(channels, 2)
        self.heatmap_head[-1].bias.data.fill_(-2.19)

    @staticmethod
    def _build(channels, out):
        return nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, out, 1))

    def forward(self, feat):
        return self.heatmap_head(feat).sigmoid(), self.wh_head(feat), self.offset_head(feat)

    def loss(self, preds, targets):
        heatmap, wh, offset = preds
        pos = targets["heatmap"].eq(1).any(1, keepdim=True)
        avg = max(1, int(pos.sum()))
        return {
            "loss_heatmap": gaussian_focal_loss(heatmap, targets["heatmap"]).sum() / avg,
            "loss_wh": 0.1 * (F.l1_loss(wh, targets["wh"], reduction="none") * pos).sum() / avg,
            "loss_offset": (F.l1_loss(offset, targets["offset"], reduction="none") * pos).sum() / avg,
        }


class CenterNet(nn.Module):
    def __init__(self, num_classes=2):
        super().__init__()
        self.backbone = nn.Sequential(ConvModule(3, 8, 2), ConvModule(8, 16, 2), ConvModule(16, 16))
        self.bbox_head = CenterNetHead(16, num_classes)

    def forward(self, img):
        return self.bbox_head(self.backbone(img))


def make_batch(n, size, g):
    cells = size // STRIDE
    img = torch.rand(n, 3, size, size, generator=g) * 0.3
    target = {
        "heatmap": torch.zeros(n, 2, cells, cells),
        "wh": torch.zeros(n, 2, cells, cells),
        "offset": torch.zeros(n, 2, cells, cells),
    }
    grid = torch.arange(cells).float()
    for i in range(n):
        label = int(torch.randint(2, (), generator=g))
        cx, cy = torch.randint(3, cells - 3, (2,), generator=g).tolist()
        half = int(torch.randint(4, 9, (), generator=g))
        img[
            i, label, cy * STRIDE - half + 2 : cy * STRIDE + half + 2, cx * STRIDE - half + 2 : cx * STRIDE + half + 2
        ] += 0.7
        blob = torch.exp(-((grid[None] - cx) ** 2 + (grid[:, None] - cy) ** 2) / 2)
        target["heatmap"][i, label] = blob
        target["wh"][i, :, cy, cx] = 2.0 * half / STRIDE
        target["offset"][i, :, cy, cx] = 0.5
    return img, target


def train():
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(3)
    model = CenterNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for it in range(60):
        img, target = make_batch(4, 48, g)
        with torch.autocast("cpu", dtype=torch.float16):
            losses = model.bbox_head.loss(model(img), target)
            loss = sum(losses.values())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=35)
        scaler.step(optimizer)
        scaler.update()
        if it % 10 == 0:
            print(
                f"Iter [{it}/60]",
                ", ".join(f"{k}: {v.item():.4f}" for k, v in losses.items()),
                f"grad_norm: {grad_norm:.2f}",
            )


train()
