"""Point clouds: which solid were the points drawn from? Attention pooling over 2048 points, operands in e4m3."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(88)
POINTS, D, SOLIDS = 2048, 32, 4


def clouds(n):
    solid = torch.randint(SOLIDS, (n,))
    p = torch.randn(n, POINTS, 3)
    unit = F.normalize(p, dim=-1)
    cube = p.clamp(-1, 1) / p.abs().amax(-1, keepdim=True).clamp(max=1)
    disc = F.normalize(p, dim=-1) * torch.tensor([1.2, 1.2, 0.3])
    rod = F.normalize(p, dim=-1) * torch.tensor([0.5, 0.5, 1.6])
    x = torch.stack([unit, cube, disc, rod])[solid, torch.arange(n)]
    return x + 0.05 * torch.randn_like(x), solid


def to_f8(x):
    """Rounds to e4m3; the gradient passes straight through."""
    return x + (x.to(torch.float8_e4m3fn).to(x.dtype) - x).detach()


class Pool(nn.Module):
    def __init__(self, queries=4):
        super().__init__()
        self.q = nn.Parameter(0.1 * torch.randn(queries, D))
        self.k, self.v = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        scores = self.q @ self.k(x).transpose(1, 2) / D**0.5
        weights = scores.softmax(-1)
        return (to_f8(weights) @ to_f8(self.v(x))).flatten(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(3, D), nn.GELU(), nn.Linear(D, D), nn.GELU())
        self.pool = Pool()
        self.head = nn.Linear(4 * D, SOLIDS)

    def forward(self, x):
        return self.head(self.pool(self.lift(x)))


model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(60):
    x, solid = clouds(12)
    loss = F.cross_entropy(model(x), solid)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
