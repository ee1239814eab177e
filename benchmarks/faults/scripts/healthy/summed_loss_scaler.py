"""A point-cloud autoencoder whose loss is a sum: the scaler falls from 2^16 to a few, where it belongs, and stays."""

import torch
from torch import nn


class Folding(nn.Module):
    def __init__(self, d=32, points=48):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, d), nn.ReLU(), nn.Linear(d, d))
        self.code = nn.Linear(d, 12)
        grid = torch.linspace(-1, 1, points).view(1, -1, 1)
        self.register_buffer("grid", torch.cat([grid, grid.square()], -1))
        self.fold = nn.Sequential(nn.Linear(14, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 3))

    def forward(self, cloud):
        code = self.code(self.local(cloud).amax(1))
        code = code.unsqueeze(1).expand(-1, self.grid.shape[1], -1)
        return self.fold(torch.cat([self.grid.expand(len(cloud), -1, -1).to(code.dtype), code], -1))


def chamfer(a, b):
    d = torch.cdist(a, b).square()
    return d.amin(1).sum() + d.amin(2).sum()


def clouds(n):
    t = torch.rand(n, 64, 1) * 6.28
    radius = 1 + torch.rand(n, 1, 1)
    return torch.cat([radius * t.cos(), radius * t.sin(), torch.rand(n, 1, 1) * t / 3], -1)


torch.manual_seed(423)
model = Folding()
optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(110):
    cloud = clouds(24)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        drawn = model(cloud)
    loss = chamfer(drawn.float(), cloud)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.2f} scale {scaler.get_scale():g}")
