"""A small ViT: warm-up from a rate of 0, cosine to a rate of 0, mixup, label smoothing, accumulation over two halves."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class ViT(nn.Module):
    def __init__(self, d=32, classes=6, layers=2):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 10, d))
        layer = nn.TransformerEncoderLayer(d, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(d), enable_nested_tensor=False)
        self.head = nn.Linear(d, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1) + self.pos
        return self.head(self.encoder(tokens)[:, 0])


def images(n, prototypes):
    y = torch.randint(len(prototypes), (n,))
    return prototypes[y] + 0.5 * torch.randn(n, 1, 12, 12), y


def mixup(x, y, classes, alpha=0.2):
    lam = 1 - 0.5 * torch.rand(()).item() * alpha
    order = torch.randperm(len(x))
    target = F.one_hot(y, classes).to(x.dtype)
    return lam * x + (1 - lam) * x[order], lam * target + (1 - lam) * target[order]


def main(steps=90, warmup=15):
    torch.manual_seed(7028)
    prototypes = torch.randn(6, 1, 12, 12)
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    def factor(step):
        if step < warmup:
            return step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - 1 - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(2):
            x, target = mixup(*images(24, prototypes), 6)
            loss = F.cross_entropy(model(x), target, label_smoothing=0.1) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 4 == 0:
            print(f"step {step:3d} lr {optimizer.param_groups[0]['lr']:.2e} loss {total:.4f}")


main()
