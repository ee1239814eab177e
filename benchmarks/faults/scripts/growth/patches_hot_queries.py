"""A small vision transformer without normalisation of queries and keys, whose two projections have a rate of their own."""

import torch
import torch.nn.functional as F
from torch import nn


class Scores(nn.Module):
    def forward(self, q, k):
        return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.scores, self.out = Scores(), nn.Linear(width, width)

    def forward(self, x):
        return self.out(self.scores(self.q(x), self.k(x)).softmax(-1) @ self.v(x))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.patch, self.place = nn.Linear(8, width), nn.Parameter(0.1 * torch.randn(12, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, 6)

    def forward(self, x):
        h = self.patch(x) + self.place
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


torch.manual_seed(3133)
kinds = torch.randn(6, 8)
model = TinyViT()
hot = [p for n, p in model.named_parameters() if ".q." in n or ".k." in n]
rest = [p for n, p in model.named_parameters() if ".q." not in n and ".k." not in n]
optimizer = torch.optim.Adam([{"params": hot, "lr": 1.0}, {"params": rest, "lr": 2e-3}])
for step in range(80):
    y = torch.randint(0, 6, (48,))
    x = torch.randn(48, 12, 8)
    x[torch.arange(48), torch.randint(0, 12, (48,))] = 2 * kinds[y]
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        print(f"step {step + 1:2d} loss {loss.item():.4f}")
