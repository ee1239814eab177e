"""Street scenes: a main head for classes and an auxiliary head for boundaries, FP16 autocast with GradScaler."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


class SceneNet(nn.Module):
    def __init__(self, ch=12, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, ch, 3, padding=1)
        self.branch = nn.Sequential(
            nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU(), nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU()
        )
        self.main = nn.Conv2d(ch, classes, 1)
        self.boundary = nn.Conv2d(3, 1, 3, padding=1)

    def forward(self, x):
        return self.main(self.branch(F.relu(self.stem(x)))), self.boundary(x)


def scenes(n, colours, size=24):
    classes = torch.randint(0, 4, (n, 3, 3)).repeat_interleave(size // 3, 1).repeat_interleave(size // 3, 2)
    picture = colours[classes].permute(0, 3, 1, 2) + 0.5 * torch.randn(n, 3, size, size)
    edge = (classes != torch.roll(classes, 1, 2)) | (classes != torch.roll(classes, 1, 1))
    return picture, classes, edge.float().unsqueeze(1)


def main():
    torch.manual_seed(90)
    colours = torch.randn(4, 3)
    model = SceneNet()
    optimizer = torch.optim.Adam(
        [
            {"params": [p for n, p in model.named_parameters() if "boundary" not in n]},
            {"params": model.boundary.parameters(), "lr": 1e-4},
        ],
        lr=3e-3,
    )
    scaler = GradScaler("cpu", growth_interval=1000)
    for step in range(70):
        picture, classes, edge = scenes(8, colours)
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            logits, boundary = model(picture)
            main_loss = F.cross_entropy(logits, classes)
            aux_loss = F.mse_loss(boundary * 255, edge * 255, reduction="sum")
        scaler.scale(main_loss + aux_loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 4:
            print(
                f"step {step + 1} main loss {main_loss.item():.4f} aux {aux_loss.item():.3g} scale {scaler.get_scale():g}"
            )


main()
