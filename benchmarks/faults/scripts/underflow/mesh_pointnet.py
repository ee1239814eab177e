"""PointNet on synthetic shapes, FP32; the second shared layer was initialised around a mean below zero."""

import torch
import torch.nn.functional as F
from torch import nn


class PointNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.point1, self.point2, self.point3 = nn.Linear(3, 32), nn.Linear(32, 48), nn.Linear(48, 64)
        self.skip = nn.Linear(32, 64)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, classes)
        self.drop = nn.Dropout(0.1)
        for layer in (self.point1, self.point3, self.skip, self.fc1):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        nn.init.normal_(self.point2.weight, mean=-0.3, std=0.05)

    def forward(self, points):
        x = F.relu(self.point1(points))
        y = F.relu(self.point2(x))
        x = F.relu(self.point3(y) + self.skip(x)).amax(1)
        return self.fc2(self.drop(F.relu(self.fc1(x))))


def shapes(n, points=64):
    kind = torch.randint(4, (n,))
    u = torch.randn(n, points, 3)
    sphere = F.normalize(u, dim=-1)
    cube = u.clamp(-1, 1) / u.abs().amax(-1, keepdim=True).clamp(min=1e-3)
    disc = sphere * torch.tensor([1.0, 1.0, 0.05])
    rod = u * torch.tensor([0.1, 0.1, 0.8])
    every = torch.stack([sphere, cube, disc, rod], 1)
    return every[torch.arange(n), kind] + 0.02 * torch.randn(n, points, 3), kind


torch.manual_seed(1)
model = PointNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(120):
    points, kind = shapes(32)
    loss = F.cross_entropy(model(points), kind)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
