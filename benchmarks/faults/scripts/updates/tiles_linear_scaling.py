"""Satellite tiles with AdamW. The rate was scaled with the batch size, eight devices included."""

import argparse
import math

import torch
from torch import nn

BASE_LR, BASE_BATCH = 3e-3, 16


class TileNet(nn.Module):
    def __init__(self, bands=4, width=16, classes=6):
        super().__init__()
        self.conv1 = nn.Conv2d(bands, width, 3, 2, 1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.fc1 = nn.Linear(2 * width * 16, 64)
        self.fc2 = nn.Linear(64, classes)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        x = torch.relu(self.conv3(x)).flatten(1)
        return self.fc2(torch.relu(self.fc1(x)))


def tiles(n, cover):
    label = torch.randint(6, (n,))
    return cover[label] + torch.randn(n, 4, 16, 16), label


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(91)
    cover = 0.5 * torch.randn(6, 4, 16, 16)
    model = TileNet()
    lr = BASE_LR * args.devices * args.batch / BASE_BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 5, 0.5 * (1 + math.cos(math.pi * s / args.steps)))
    )
    for step in range(args.steps):
        image, label = tiles(args.batch, cover)
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.4f}")


main()
