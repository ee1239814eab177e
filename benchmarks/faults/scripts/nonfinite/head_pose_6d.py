"""Head rotation between two video frames from face landmarks; 6-D rotation output, geodesic loss."""

import torch
from torch import nn

LANDMARKS = 12


def rotation_from_6d(x):
    """Gram-Schmidt on two predicted columns."""
    a, b = x[..., :3], x[..., 3:]
    first = nn.functional.normalize(a, dim=-1)
    second = nn.functional.normalize(b - (first * b).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack([first, second, torch.linalg.cross(first, second)], -1)


def axis_angle(axis, angle):
    axis = nn.functional.normalize(axis, dim=-1)
    x, y, z = axis.unbind(-1)
    zero = torch.zeros_like(x)
    k = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).view(-1, 3, 3)
    angle = angle[:, None, None]
    return torch.eye(3) + angle.sin() * k + (1 - angle.cos()) * k @ k


class GeodesicLoss(nn.Module):
    """Angle of the rotation that remains."""

    def forward(self, predicted, target):
        trace = (predicted * target).sum((-2, -1))
        return torch.acos(((trace - 1) / 2).clamp(-1, 1)).mean()


class RelativePose(nn.Module):
    """Predicts the change with respect to the first frame, starting from none."""

    def __init__(self, width=64):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(3 * LANDMARKS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.compare = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU())
        self.head = nn.Linear(width, 6)
        nn.init.zeros_(self.head.weight)
        self.head.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])

    def forward(self, before, after):
        pair = torch.cat([self.encode(before.flatten(1)), self.encode(after.flatten(1))], -1)
        return rotation_from_6d(self.head(self.compare(pair)))


class Clips:
    """Pairs of frames; in one of ten the head does not move."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.face = torch.randn(LANDMARKS, 3, generator=self.generator)

    def __call__(self, n):
        angle = 0.6 * torch.rand(n, generator=self.generator)
        angle = angle * (torch.rand(n, generator=self.generator) > 0.1)
        turn = axis_angle(torch.randn(n, 3, generator=self.generator), angle)
        start = axis_angle(torch.randn(n, 3, generator=self.generator), 0.3 * torch.rand(n, generator=self.generator))
        before = self.face @ start.mT
        after = before @ turn.mT + 0.01 * torch.randn(n, LANDMARKS, 3, generator=self.generator)
        return before, after, turn


def main():
    torch.manual_seed(81)
    clips, model, criterion = Clips(82), RelativePose(), GeodesicLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(4):
        total = 0.0
        for _ in range(20):
            before, after, turn = clips(16)
            loss = criterion(model(before, after), turn)
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                p.grad.clamp_(-0.1, 0.1)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / 20:.4f} rad")


if __name__ == "__main__":
    main()
