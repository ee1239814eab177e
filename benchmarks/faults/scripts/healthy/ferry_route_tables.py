"""Which ferry a traveller takes: large hashed tables with sparse gradients beside a small dense network."""

import torch
import torch.nn.functional as F
from torch import nn


class FerryChoice(nn.Module):
    def __init__(self, buckets=5000, dim=16, routes=12):
        super().__init__()
        self.origin = nn.EmbeddingBag(buckets, dim, mode="mean", sparse=True)
        self.account = nn.Embedding(buckets, dim, sparse=True)
        self.dense = nn.Sequential(nn.Linear(2 * dim + 6, 64), nn.ReLU(), nn.Linear(64, routes))

    def forward(self, stops, account, trip):
        return self.dense(torch.cat([self.origin(stops), self.account(account), trip], 1))


def travellers(n, g, habits):
    account = (600 * torch.rand(n, generator=g) ** 3).long()
    stops = torch.randint(0, 40, (n, 4), generator=g) * 97 % 5000
    trip = torch.randn(n, 6, generator=g)
    score = habits[account] + 1.5 * F.one_hot(stops[:, 0] % 12, 12) + F.pad(trip, (0, 6))
    return stops, account, trip, torch.multinomial((1.5 * score).softmax(1), 1, generator=g).squeeze(1)


if __name__ == "__main__":
    torch.manual_seed(151)
    g = torch.Generator().manual_seed(152)
    habits = 1.5 * torch.randn(600, 12, generator=g)
    model = FerryChoice()
    tables = torch.optim.SparseAdam([model.origin.weight, model.account.weight], lr=2e-2)
    dense = torch.optim.AdamW(model.dense.parameters(), lr=3e-3)
    for step in range(300):
        *features, route = travellers(256, g, habits)
        loss = F.cross_entropy(model(*features), route)
        for optimizer in (tables, dense):
            optimizer.zero_grad()
        loss.backward()
        tables.step()
        dense.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
