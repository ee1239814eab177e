"""Daily sales per store: the loader packs all columns of a row into one half-precision tensor."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(58)
STORES, FIRST = 400, 3000
level = torch.randn(STORES)


def load(n):
    store = torch.randint(STORES, (n,))
    weekday, promo = torch.randint(7, (n,)), torch.randint(2, (n,))
    sales = level[store] + 0.3 * (weekday >= 5) + 0.5 * promo + 0.05 * torch.randn(n)
    return torch.stack([store + FIRST, weekday, promo], 1).float(), sales


class Sales(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.store = nn.Embedding(STORES + 8, d)
        self.weekday = nn.Embedding(7, 4)
        self.net = nn.Sequential(nn.Linear(d + 5, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, row):
        store, weekday = (row[:, 0] - FIRST).long(), row[:, 1].long()
        x = torch.cat([self.store(store), self.weekday(weekday), row[:, 2:].float()], 1)
        return self.net(x).squeeze(1)


dtype = torch.float16
rows, sales = load(4096)
rows = rows.to(dtype)  # half the traffic
model = Sales()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(12):
    total = 0.0
    for idx in torch.randperm(len(rows)).split(256):
        loss = F.mse_loss(model(rows[idx]), sales[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / 16
    print(f"epoch {epoch} loss {total:.4f}")
