"""Deep & cross network for clicks, binary cross-entropy written out."""

import torch
import torch.nn as nn


class DeepCross(nn.Module):
    def __init__(self, fields=20, width=64):
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(fields, fields) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(fields, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(fields + width, 1)

    def forward(self, x0):
        x = x0
        for layer in self.cross:
            x = x0 * layer(x) + x
        return torch.sigmoid(self.head(torch.cat([x, self.deep(x0)], 1))).squeeze(1)


def binary_crossentropy(p, y, epsilon=1e-7):
    p = p.clamp(epsilon, 1 - epsilon)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()


def impressions(n, w):
    x = torch.randn(n, 20).abs() * torch.tensor([1.0, 12.0]).repeat(10)
    y = ((x / torch.tensor([1.0, 12.0]).repeat(10) - 0.8) @ w > 0).float()
    return x, y


torch.manual_seed(99)
w = torch.randn(20)
model = DeepCross()
opt = torch.optim.Adam(model.parameters(), lr=5e-4)
for step in range(200):
    x, y = impressions(128, w)
    p = model(x)
    loss = binary_crossentropy(p, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"{step}: loss={loss.item():.4f} acc={((p > 0.5) == (y > 0.5)).float().mean():.3f}")
