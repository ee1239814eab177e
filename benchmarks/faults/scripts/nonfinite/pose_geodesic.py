"""Relative camera pose: rotations in the 6D representation, trained on the geodesic angle."""

import torch
from torch import nn
from torch.nn import functional as F


def rotation_from_6d(x):
    a, b = x[..., :3], x[..., 3:]
    first = F.normalize(a, dim=-1)
    second = F.normalize(b - (first * b).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack([first, second, torch.linalg.cross(first, second)], -2)


class PoseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.rotation = nn.Linear(64, 6)
        nn.init.zeros_(self.rotation.weight)  # start from "the camera has not moved"
        with torch.no_grad():
            self.rotation.bias.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, landmarks):
        return rotation_from_6d(self.rotation(self.encoder(landmarks)))


class GeodesicLoss(nn.Module):
    def forward(self, predicted, target):
        trace = (predicted * target).sum((-1, -2))
        return torch.acos(((trace - 1) / 2).clamp(-1, 1)).mean()


def frame_pairs(n):
    """Every eighth pair is a duplicated frame: no motion."""
    axis_angle = 0.3 * torch.randn(n, 3)
    axis_angle[::8] = 0
    x, y, z = axis_angle.unbind(-1)
    zero = torch.zeros_like(x)
    skew = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).view(n, 3, 3)
    rotation = torch.matrix_exp(skew)
    points = torch.randn(n, 4, 3)
    return torch.cat([points, points @ rotation.mT], -1).flatten(1), rotation


def main():
    torch.manual_seed(0)
    net, criterion = PoseNet(), GeodesicLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(10):
        landmarks, rotation = frame_pairs(32)
        loss = criterion(net(landmarks), rotation)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        print(step, f"{loss.item():.4f} rad")


main()
