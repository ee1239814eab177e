"""Semantic segmentation: most pixels are void (255), rare classes, and a validation IoU that is NaN for absent classes."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

NUM_CLASSES, VOID = 8, 255


class Scenes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            label = torch.full((24, 24), VOID)
            image = torch.randn(3, 24, 24, generator=g) * 0.2
            for _ in range(3):
                c = int(torch.randint(NUM_CLASSES - 2, (), generator=g))  # the last two are never seen
                y, x = torch.randint(0, 18, (2,), generator=g).tolist()
                label[y : y + 6, x : x + 6] = c
                image[:, y : y + 6, x : x + 6] += torch.tensor([c % 2, c // 2 % 2, c // 4]).view(3, 1, 1) * 2.0 - 1
            self.items.append((image, label))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class FCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.classifier = nn.Conv2d(48, NUM_CLASSES, 1)
        self.aux = nn.Conv2d(16, NUM_CLASSES, 1)

    def forward(self, x):
        low = self.stem(x)
        high = F.interpolate(self.down(low), size=x.shape[-2:], mode="nearest")
        return {"out": self.classifier(torch.cat([low, high], 1)), "aux": self.aux(low)}


def criterion(outputs, target):
    out, aux = (F.cross_entropy(outputs[k].float(), target, ignore_index=VOID) for k in ("out", "aux"))
    return out + 0.5 * aux


def validate(model, loader):
    model.eval()
    matrix = torch.zeros(NUM_CLASSES, NUM_CLASSES)
    with torch.no_grad():
        for image, target in loader:
            pred = model(image)["out"].argmax(1)
            keep = target != VOID
            matrix += torch.bincount(target[keep] * NUM_CLASSES + pred[keep], minlength=NUM_CLASSES**2).view(
                NUM_CLASSES, -1
            )
    hit = matrix.diag()
    iou = hit / (matrix.sum(0) + matrix.sum(1) - hit)
    recall = hit / matrix.sum(1)
    return np.nanmean(iou.numpy()), iou, recall


def main():
    torch.manual_seed(0)
    model = FCN()
    compiled = torch.compile(model, backend="aot_eager")
    train = DataLoader(Scenes(96, 1), batch_size=8, shuffle=True, drop_last=True)
    val = DataLoader(Scenes(16, 2), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    total = 4 * len(train)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=total, power=0.9)
    for epoch in range(4):
        model.train()
        for image, target in train:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = compiled(image)
            loss = criterion(outputs, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        miou, iou, _ = validate(model, val)
        print(f"epoch {epoch} loss {loss.item():.4f} mIoU {miou:.3f}", [round(v, 2) for v in iou.tolist()])


if __name__ == "__main__":
    main()
