"""Click-through rates from hashed features; the tables have a parameter group of their own."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(777)
FIELDS, BUCKETS = 6, 50
effect = torch.randn(FIELDS, BUCKETS)
cross = torch.randn(BUCKETS, BUCKETS)


def impressions(n):
    ids = torch.randint(BUCKETS, (n, FIELDS))
    z = effect[torch.arange(FIELDS), ids].sum(1) + cross[ids[:, 0], ids[:, 1]]
    return ids, torch.bernoulli(torch.sigmoid(z - 0.5))


class DeepFM(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.tables = nn.Embedding(FIELDS * BUCKETS, d)
        self.linear = nn.Embedding(FIELDS * BUCKETS, 1)
        nn.init.normal_(self.tables.weight, std=0.05)
        nn.init.zeros_(self.linear.weight)
        self.deep = nn.Sequential(nn.Linear(FIELDS * d, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("offset", torch.arange(FIELDS) * BUCKETS)

    def forward(self, ids):
        e = self.tables(ids + self.offset)
        fm = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(-1)
        return fm + self.linear(ids + self.offset).sum((1, 2)) + self.deep(e.flatten(1)).squeeze(-1)


model = DeepFM()
tables = [model.tables.weight, model.linear.weight]
groups = [{"params": tables, "lr": 0.3}, {"params": model.deep.parameters(), "lr": 1e-3}]
optimizer = torch.optim.Adam(groups)
for step in range(150):
    ids, clicked = impressions(512)
    loss = F.binary_cross_entropy_with_logits(model(ids), clicked)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if step % 3 == 2:
        print(f"step {step} loss {loss.item():.4f}")
