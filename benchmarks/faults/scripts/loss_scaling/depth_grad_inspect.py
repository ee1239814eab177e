"""Monocular depth with a small convolutional network, mixed precision, and gradient norms in the log."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--clip", type=float, default=5.0)
args = parser.parse_args()
torch.manual_seed(64)


def scenes(n, size=20):
    """Shaded planes; the depth is linear in the image coordinates and the shade falls with it."""
    slope = torch.randn(n, 2, 1, 1)
    axis = torch.linspace(-1, 1, size)
    depth = 2 + 0.5 * slope[:, :1] * axis[:, None] + 0.5 * slope[:, 1:] * axis[None, :]
    shade = torch.exp(-0.5 * depth) * torch.tensor([1.0, 0.7, 0.4])[:, None, None]
    return 3 * shade + 0.05 * torch.randn(n, 3, size, size), depth


class DepthNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for conv in self.blocks:
            x = x + F.relu(conv(x))
        return self.head(x)


def berhu(pred, target):
    error = (pred - target).abs()
    c = 0.2 * error.max().detach()
    return torch.where(error <= c, error, (error**2 + c**2) / (2 * c)).mean()


model = DepthNet()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for iteration in range(args.iterations):
    image, depth = scenes(args.batch)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(image)
    loss = berhu(pred.float(), depth)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    inv_scale = 1.0 / scaler.get_scale()
    for p in model.parameters():
        p.grad.mul_(inv_scale)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    scaler.step(optimizer)
    scaler.update()
    if iteration % 5 == 4:
        print(f"iter {iteration + 1} loss {loss.item():.4f} |g| {grad_norm.item():.3f} scale {scaler.get_scale():.0f}")
