"""Orientation of scanned parts: nine numbers per cloud, projected onto the rotations by SVD; the head starts at identity."""

import torch
from torch import nn


class SVDRotation(nn.Module):
    """The nearest rotation to a 3 x 3 matrix."""

    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, 9)
        nn.init.zeros_(self.fc.weight)
        self.fc.bias.data = torch.eye(3).flatten()

    def forward(self, h):
        m = self.fc(h).view(-1, 3, 3)
        u, s, vh = torch.linalg.svd(m)
        sign = torch.det(u @ vh)
        flip = torch.stack([torch.ones_like(sign), torch.ones_like(sign), sign], -1)
        return (u * flip.unsqueeze(1)) @ vh


class PoseNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.pool = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.rotation = SVDRotation(width)

    def forward(self, cloud):
        return self.rotation(self.pool(self.point(cloud).amax(1)))


def random_rotations(n, spread):
    axis = nn.functional.normalize(torch.randn(n, 3), dim=-1) * (torch.rand(n, 1) * spread)
    skew = torch.zeros(n, 3, 3)
    skew[:, 0, 1], skew[:, 0, 2], skew[:, 1, 2] = -axis[:, 2], axis[:, 1], -axis[:, 0]
    return torch.linalg.matrix_exp(skew - skew.transpose(1, 2))


def batch(part, n=16):
    rotation = random_rotations(n, 1.2)
    return part @ rotation.transpose(1, 2) + 0.01 * torch.randn(n, *part.shape), rotation


def main():
    torch.manual_seed(8)
    part = torch.randn(60, 3) * torch.tensor([1.0, 0.5, 0.2])
    model = PoseNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    for step in range(30):
        cloud, target = batch(part)
        loss = (model(cloud) - target).square().sum((1, 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 5 == 0:
            print(f"step {step} chordal loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
