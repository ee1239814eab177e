"""Item-to-item recommendations; the whole model is cast to half to fit, Adam straight on it."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(29)
ITEMS, DIM, BASKET = 300, 32, 5


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM)
        self.merge = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, basket):
        context = self.merge(self.items(basket).mean(1))
        return context @ self.items.weight.T


taste = torch.randint(10, (ITEMS,))
shelves = [torch.nonzero(taste == k).squeeze(1) for k in range(10)]


def baskets(n):
    rows = []
    for k in torch.randint(10, (n,)).tolist():
        shelf = shelves[k]
        rows.append(shelf[torch.randint(len(shelf), (BASKET + 1,))])
    rows = torch.stack(rows)
    return rows[:, :-1], rows[:, -1]


def sampled_loss(scores, bought, k=40):
    pool = torch.cat([bought.unique(), torch.randint(ITEMS, (k,))]).unique()
    where = torch.searchsorted(pool, bought)
    return F.cross_entropy(scores[:, pool].float(), where)


model = TwoTower().half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(60):
    basket, bought = baskets(64)
    loss = sampled_loss(model(basket), bought)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
