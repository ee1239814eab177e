"""Relative camera motion from point tracks: an se(3) twist per pair, exponential map, reprojection loss."""

import torch
from torch import nn

torch.manual_seed(3)
POINTS = 12


def hat(w):
    x, y, z = w.unbind(-1)
    o = torch.zeros_like(x)
    return torch.stack([o, -z, y, z, o, -x, -y, x, o], -1).view(*w.shape[:-1], 3, 3)


class ExpSO3(nn.Module):
    def forward(self, w):
        theta = w.norm(dim=-1).view(-1, 1, 1)
        k = hat(w)
        a = torch.where(theta < 1e-4, 1 - theta**2 / 6, theta.sin() / theta)
        b = torch.where(theta < 1e-4, 0.5 - theta**2 / 24, (1 - theta.cos()) / theta**2)
        return torch.eye(3) + a * k + b * (k @ k)


class MotionNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(POINTS * 5, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.rotation = nn.Linear(width, 3, bias=False)
        self.shift = nn.Linear(width, 3)
        self.exp = ExpSO3()

    def forward(self, cloud, seen):
        h = self.encode(torch.cat([cloud, seen], -1).flatten(1))
        r = self.exp(self.rotation(h))
        return project(cloud @ r.transpose(1, 2) + self.shift(h).unsqueeze(1))


def project(p):
    return p[..., :2] / p[..., 2:].clamp(min=0.5)


def pairs(n, still):
    cloud = torch.rand(n, POINTS, 3) * 2 + torch.tensor([-1.0, -1.0, 3.0])
    w, t = 0.1 * torch.randn(n, 3), 0.1 * torch.randn(n, 3)
    seen = project(cloud + torch.cross(w.unsqueeze(1).expand_as(cloud), cloud, dim=-1) + t.unsqueeze(1))
    dropped = torch.rand(n) < still  # tracker lost everything: zeros
    return cloud.masked_fill(dropped.view(-1, 1, 1), 0), seen.masked_fill(dropped.view(-1, 1, 1), 0)


net = MotionNet()
for m in net.encode:
    if isinstance(m, nn.Linear):
        nn.init.zeros_(m.bias)
        m.bias.requires_grad_(False)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for it in range(120):
    cloud, seen = pairs(32, still=0.0 if it < 40 else 0.0015)
    loss = (net(cloud, seen) - seen).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 10 == 0:
        print(f"it {it} loss {loss.item():.4f}")
