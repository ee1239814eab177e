"""Clicks from crossed features; a hash that wraps around in 64 bits on purpose picks the rows of one table."""

import torch
from torch import nn

BUCKETS = 2000
MIX = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer


def crossed(a, b):
    h = (a * MIX) ^ (b + 1)
    h = h * MIX  # wraps
    return (h >> 33) % BUCKETS


class CrossNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.crosses = nn.EmbeddingBag(BUCKETS, 8, mode="sum")
        self.click = nn.Linear(8, 1)

    def forward(self, ids):
        pairs = [crossed(ids[:, i], ids[:, j]) for i in range(3) for j in range(i + 1, 3)]
        return self.click(torch.relu(self.crosses(torch.stack(pairs, 1)))).squeeze(-1)


torch.manual_seed(104)
taste = torch.randn(20, 20)
model = CrossNet()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for step in range(250):
    ids = torch.randint(20, (256, 3))
    click = torch.bernoulli(torch.sigmoid(3 * taste[ids[:, 0], ids[:, 1]]))
    loss = nn.functional.binary_cross_entropy_with_logits(model(ids + 9_000_000_000_000), click)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
