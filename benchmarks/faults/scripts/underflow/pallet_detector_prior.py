"""Anchor-free pallet detector on tiny depth images: objectness and offset for every cell."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

NUM_CLASSES = 4
PRIOR = 0.01


class Neck(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.lateral = nn.Conv2d(c, 16, 1)
        self.reduce = nn.Conv2d(16, NUM_CLASSES, 1)
        self.expand = nn.Conv2d(NUM_CLASSES, 24, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.lateral(x))
        return self.expand(F.relu(self.reduce(x)))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(16, 24, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, 1, 1),
            nn.ReLU(),
        )
        self.neck = Neck(24)
        self.cls = nn.Conv2d(24, NUM_CLASSES, 3, padding=1)
        self.reg = nn.Conv2d(24, 2, 3, padding=1)
        self.reset()

    def reset(self):
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.normal_(m.weight, std=0.08)
                nn.init.zeros_(m.bias)
                if m.out_channels == NUM_CLASSES:
                    nn.init.constant_(m.bias, -math.log((1 - PRIOR) / PRIOR))

    def forward(self, x):
        x = self.neck(self.body(F.relu(self.stem(x))))
        x = F.relu(x)
        return self.cls(x), self.reg(x)


def images(n):
    x = 0.2 * torch.randn(n, 1, 16, 16)
    cls, reg = torch.zeros(n, NUM_CLASSES, 8, 8), torch.zeros(n, 2, 8, 8)
    for i in range(n):
        for _ in range(3):
            k, r, c = int(torch.randint(NUM_CLASSES, ())), int(torch.randint(1, 7, ())), int(torch.randint(1, 7, ()))
            x[i, 0, 2 * r : 2 * r + 2 + k % 2, 2 * c : 2 * c + 2 + k // 2] += 2.0
            cls[i, k, r, c] = 1
            reg[i, :, r, c] = torch.tensor([k % 2, k // 2]).float()
    return x, cls, reg


def detection_loss(out, cls, reg):
    score, offset = out
    p = torch.sigmoid(score)
    focal = F.binary_cross_entropy_with_logits(score, cls, reduction="none") * (cls - p).abs() ** 2
    hit = cls.amax(1, keepdim=True)
    return (focal.sum() + ((offset - reg).abs() * hit).sum()) / hit.sum()


def main():
    torch.manual_seed(2)
    model = Detector()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    pool = [images(8) for _ in range(6)]
    for step in range(110):
        x, cls, reg = pool[step % len(pool)]
        loss = detection_loss(model(x), cls, reg)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
