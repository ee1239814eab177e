"""A picture in a hash grid: gradients of 1e-8, most of them zero, and Adam with eps=1e-15, as instant-ngp has it."""

import torch
import torch.nn as nn


class HashGrid(nn.Module):
    def __init__(self, levels=4, size=2048, features=2, base=8, growth=1.8):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, features) for _ in range(levels))
        self.resolution = [int(base * growth**i) for i in range(levels)]
        self.size = size
        for table in self.tables:
            nn.init.uniform_(table.weight, -1e-4, 1e-4)

    def forward(self, xy):
        out = []
        for table, resolution in zip(self.tables, self.resolution):
            scaled = xy * resolution
            low = scaled.floor().long()
            w = scaled - low
            total = 0
            for dx in (0, 1):
                for dy in (0, 1):
                    index = ((low[:, 0] + dx) ^ ((low[:, 1] + dy) * 2654435761)) % self.size
                    weight = (w[:, 0] if dx else 1 - w[:, 0]) * (w[:, 1] if dy else 1 - w[:, 1])
                    total = total + weight[:, None] * table(index)
            out.append(total)
        return torch.cat(out, -1)


class ImageField(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoding = HashGrid()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, xy):
        return self.network(self.encoding(xy))


def picture(xy):
    x, y = xy.unbind(-1)
    rings = torch.sin(40 * ((x - 0.5) ** 2 + (y - 0.4) ** 2).sqrt())
    return torch.stack([0.5 + 0.5 * rings, x * y, (x > y).float()], -1)


torch.manual_seed(628)
field = ImageField()
optimizer = torch.optim.Adam(
    [
        {"params": field.encoding.parameters(), "lr": 1e-2},
        {"params": field.network.parameters(), "lr": 1e-2, "weight_decay": 1e-6},
    ],
    betas=(0.9, 0.99),
    eps=1e-15,
)
for step in range(200):
    xy = torch.rand(1024, 2)
    target = picture(xy)
    loss = (field(xy) - target).square().mean()
    optimizer.zero_grad()
    (1e-3 * loss).backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"Step#{step}: loss={loss.item():.5f}")
