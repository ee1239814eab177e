"""Orientation of a cube from its corners: predict a quaternion, compare by the geodesic angle."""

from __future__ import annotations

import torch
from torch import Tensor, nn

torch.manual_seed(8)
CORNERS = torch.tensor([[x, y, z] for x in (-1.0, 1.0) for y in (-1.0, 1.0) for z in (-1.0, 1.0)])


def random_quaternions(n: int, spread: float) -> Tensor:
    q = torch.cat([torch.ones(n, 1), spread * torch.randn(n, 3)], 1)
    return q / q.norm(dim=1, keepdim=True)


def rotate(q: Tensor, v: Tensor) -> Tensor:
    w, u = q[:, None, :1], q[:, None, 1:].expand(-1, v.shape[0], -1)
    v = v.expand(len(q), -1, -1)
    t = 2 * torch.cross(u, v, dim=-1)
    return v + w * t + torch.cross(u, t, dim=-1)


class Orienter(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.quaternion = nn.Linear(width, 4)
        with torch.no_grad():
            self.quaternion.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))

    def forward(self, corners: Tensor) -> Tensor:
        q = self.quaternion(self.body(corners.flatten(1)))
        return nn.functional.normalize(q, dim=1)


class Geodesic(nn.Module):
    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        r, s = rotate(p, torch.eye(3)), rotate(q, torch.eye(3))
        trace = (r * s).sum((1, 2))
        cosine = ((trace - 1) / 2).clamp(-1 + 1e-6, 1 - 1e-6)
        return torch.acos(cosine).mean()


def main() -> None:
    net, criterion = Orienter(), Geodesic()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for step in range(200):
        q = random_quaternions(128, spread=0.15)
        loss = criterion(net(rotate(q, CORNERS)), q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")


main()
