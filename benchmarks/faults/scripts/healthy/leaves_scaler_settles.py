"""Leaf images with AMP: the default loss scale overflows a few times at first and then stays."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast


class LeafNet(nn.Module):
    def __init__(self, classes=7):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.fc = nn.Linear(128, classes)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).flatten(1))


def leaves(n, kinds):
    label = torch.randint(len(kinds), (n,))
    return kinds[label] + 0.6 * torch.randn(n, 3, 24, 24), label


def main():
    torch.manual_seed(103)
    kinds = torch.randn(7, 3, 24, 24)
    model = LeafNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    for step in range(90):
        image, label = leaves(24, kinds)
        with autocast("cpu", dtype=torch.float16):
            logits = model(image)
            loss = nn.functional.cross_entropy(logits.float(), label)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 3 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
