"""Small heat-map detector in FP16 with a GradScaler; the gradient is clipped right after backward()."""

import torch
import torch.nn as nn
import torch.nn.functional as F

MAX_NORM = 5.0


class Detector(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, c, 3, 2, 1),
            nn.BatchNorm2d(c),
            nn.ReLU(),
            nn.Conv2d(c, 2 * c, 3, 1, 1),
            nn.BatchNorm2d(2 * c),
            nn.ReLU(),
        )
        self.heatmap = nn.Conv2d(2 * c, 1, 1)
        self.size = nn.Conv2d(2 * c, 2, 1)

    def forward(self, x):
        f = self.backbone(x)
        return self.heatmap(f).squeeze(1), self.size(f)


def scenes(n, s=16):
    image, heat, wh = torch.zeros(n, s, s), torch.zeros(n, s // 2, s // 2), torch.rand(n, 2) * 2 + 1
    for i in range(n):
        y, x = torch.randint(2, s - 3, (2,)).tolist()
        h, w = (2 * wh[i]).int().tolist()
        image[i, y : y + h, x : x + w] = 1.0
        heat[i, y // 2, x // 2] = 1.0
    return image.unsqueeze(1) + 0.05 * torch.randn(n, 1, s, s), heat, wh


def train_one_epoch(model, optimizer, scaler, epoch):
    for i in range(20):
        image, heat, wh = scenes(16)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits, size = model(image)
        focal = F.binary_cross_entropy_with_logits(logits.float(), heat, pos_weight=torch.tensor(20.0))
        mask = heat.unsqueeze(1)
        offset = ((size.float() - wh[:, :, None, None]).abs() * mask).sum() / mask.sum()
        loss = focal + 0.2 * offset
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        if i % 5 == 0:
            print(f"epoch {epoch} [{i}/20] loss {loss.item():.4f}")


torch.manual_seed(2121)
detector = Detector()
sgd = torch.optim.SGD(detector.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
grad_scaler = torch.amp.GradScaler("cpu")
for epoch in range(5):
    train_one_epoch(detector, sgd, grad_scaler, epoch)
