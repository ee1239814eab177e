"""Kernel-point convolution on lidar surveys; later tiles keep their projected coordinates (metres east and north)."""

import itertools

import torch
from torch import nn


def pairwise_distance(a, b):
    sq_a, sq_b = a.pow(2).sum(-1, keepdim=True), b.pow(2).sum(-1, keepdim=True)
    return torch.sqrt(sq_a + sq_b.transpose(1, 2) - 2 * a @ b.transpose(1, 2))


class KernelPoints(nn.Module):
    """Features gathered where the points lie near one of 27 kernel points around the cloud's centre."""

    def __init__(self, d_in, d_out, radius):
        super().__init__()
        grid = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=3)))
        self.register_buffer("grid", radius * grid)
        self.sigma = nn.Parameter(torch.tensor(radius))
        self.mix = nn.Linear(d_in, d_out)
        self.out = nn.Linear(27 * d_out, d_out)

    def forward(self, xyz, h):
        kernel = xyz.mean(1, keepdim=True) + self.grid
        near = torch.relu(1 - pairwise_distance(xyz, kernel) / self.sigma)
        pooled = torch.einsum("bnk,bnd->bkd", near, torch.relu(self.mix(h)))
        return self.out(pooled.flatten(1))


class SurveyNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.lift = nn.Linear(1, 16)
        self.fine = KernelPoints(16, 16, 0.3)
        self.coarse = KernelPoints(16, 16, 0.7)
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, xyz, intensity):
        h = self.lift(intensity)
        return self.head(torch.cat([self.fine(xyz, h), self.coarse(xyz, h)], -1))


def tiles(n_clouds, n_points, origin):
    kind = torch.randint(3, (n_clouds,))
    u, v = torch.rand(2, n_clouds, n_points)
    plane = torch.stack([u, v, 0.05 * torch.randn_like(u)], -1)
    ridge = torch.stack([u, v, 1 - (2 * u - 1).abs()], -1)
    tower = torch.stack([0.2 * u, 0.2 * v, 3 * torch.rand_like(u)], -1)
    cloud = torch.stack([plane, ridge, tower], 1)[torch.arange(n_clouds), kind]
    return cloud + origin, torch.rand(n_clouds, n_points, 1), kind


torch.manual_seed(12)
model = SurveyNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=30)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
for step in range(30):
    origin = torch.tensor([0.0, 0.0, 0.0] if step < 18 else [612.0, 5408.0, 41.0])
    xyz, intensity, kind = tiles(8, 48, origin)
    loss = loss_fn(model(xyz, intensity), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 6 == 0:
        print(f"step {step:2d} loss {loss.item():.4f}")
