"""Reads five-letter captchas with a convolutional reader under FP16 autocast and a gradient scaler."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

LETTERS, PLACES = 16, 5


class Reader(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
        )
        self.pool = nn.AdaptiveAvgPool2d((2, PLACES))
        self.letter = nn.Linear(4 * width, LETTERS)

    def forward(self, image):
        h = self.pool(self.features(image))
        return self.letter(h.permute(0, 3, 1, 2).flatten(2))


class Font:
    def __init__(self):
        self.glyphs = (torch.rand(LETTERS, 8, 8) < 0.4).float()

    def captchas(self, n):
        text = torch.randint(LETTERS, (n, PLACES))
        image = self.glyphs[text].permute(0, 2, 1, 3).reshape(n, 1, 8, 8 * PLACES)
        return F.pad(image, (2, 2, 4, 4)) + 0.3 * torch.randn(n, 1, 16, 8 * PLACES + 4), text


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--loss-scale", type=float, default=2.0**16)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args(argv)
    torch.manual_seed(109)
    font, reader = Font(), Reader()
    optimizer = torch.optim.SGD(reader.parameters(), lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=args.loss_scale)
    for step in range(args.steps):
        image, text = font.captchas(24)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = reader(image)
            loss = F.cross_entropy(logits.float().flatten(0, 1), text.flatten(), reduction="sum") / len(image)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(args.loss_scale)
        if step % 4 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


main([])
