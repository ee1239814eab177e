"""Which record is bought next: 5000 records in a sparse table under SparseAdam, a dense tower under AdamW."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(606)
RECORDS = 5000


class Shop(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.records = nn.Embedding(RECORDS, dim, sparse=True)
        self.tower = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, bought):
        return self.tower(self.records(bought).mean(1))


shop = Shop()
dense, sparse = (
    torch.optim.AdamW(shop.tower.parameters(), lr=3e-3),
    torch.optim.SparseAdam(shop.records.parameters(), lr=2e-2),
)
for step in range(200):
    genre = torch.randint(8, (48,))
    rank = (torch.rand(48, 5) ** 4 * RECORDS / 8).long()
    loss = F.cross_entropy(shop(rank * 8 + genre[:, None]), genre)
    dense.zero_grad()
    sparse.zero_grad()
    loss.backward()
    dense.step()
    sparse.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
