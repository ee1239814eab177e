"""A one-stage detector's class head over 4096 anchors; focal loss, averaged over all anchors and classes."""

import torch
import torch.nn.functional as F
from torch import nn

ANCHORS, CLASSES, WIDTH = 1024, 8, 24


def sigmoid_focal(logits, targets, alpha=0.25, gamma=2.0):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    weight = alpha * targets + (1 - alpha) * (1 - targets)
    return weight * (1 - p_t) ** gamma * ce


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.cls_score = nn.Linear(WIDTH, CLASSES)
        nn.init.constant_(self.cls_score.bias, -4.6)

    def forward(self, features):
        return self.cls_score(self.tower(features))


def scene(g, prototypes, images=4):
    labels = torch.full((images, ANCHORS), -1)
    hit = torch.rand(images, ANCHORS, generator=g) < 0.02
    labels[hit] = torch.randint(0, CLASSES, (int(hit.sum()),), generator=g)
    features = torch.randn(images, ANCHORS, 16, generator=g) * 0.4
    features[hit] += prototypes[labels[hit]]
    targets = F.one_hot(labels.clamp(min=0), CLASSES) * hit.unsqueeze(-1)
    return features, targets.to(features.dtype)


def main():
    torch.manual_seed(3104)
    g = torch.Generator().manual_seed(1)
    prototypes = torch.randn(CLASSES, 16, generator=g)
    head = Head()
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3, eps=1e-12)
    for step in range(50):
        features, targets = scene(g, prototypes)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = head(features)
        loss = sigmoid_focal(logits.float(), targets).mean()
        optimizer.zero_grad()
        (0.01 * loss).backward()  # beside the boxes, whose loss is not averaged
        optimizer.step()
        if step % 5 == 4:
            per_object = sigmoid_focal(logits.detach().float(), targets).sum() / targets.sum()
            print(f"step {step + 1}: mean {loss.item():.3e}, per object loss {per_object.item():.4f}")


main()
