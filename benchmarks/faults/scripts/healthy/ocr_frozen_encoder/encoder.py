import torch
import torch.nn as nn
import torch.nn.functional as F


class GlyphEncoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.dim = 2 * width * 9

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x))).flatten(1)


def glyphs(n, classes, generator, seed=0):
    """Random 12x12 glyphs with noise and strokes of varying strength."""
    shapes = (torch.rand(classes, 12, 12, generator=torch.Generator().manual_seed(seed)) > 0.65).float()
    y = torch.randint(classes, (n,), generator=generator)
    strength = 0.5 + torch.rand(n, 1, 1, generator=generator)
    return (strength * shapes[y] + 0.5 * torch.randn(n, 12, 12, generator=generator))[:, None], y


def pretrain(generator, classes=10, steps=60):
    """An encoder trained on another alphabet."""
    encoder = GlyphEncoder()
    head = nn.Linear(encoder.dim, classes)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=2e-3)
    for _ in range(steps):
        x, y = glyphs(64, classes, generator, seed=1)
        optimizer.zero_grad()
        F.cross_entropy(head(encoder(x)), y).backward()
        optimizer.step()
    return encoder
