"""Recommender whose batches are one matrix of user id, item id and price; the loader casts the matrix to half."""

import torch
import torch.nn as nn
import torch.nn.functional as F

USERS, ITEMS = 200, 6000
BATCH_DTYPE = torch.float16


class TwoTower(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS + 1, dim, padding_idx=0)
        self.item_bias = nn.Embedding(ITEMS + 1, 1)
        self.price = nn.Linear(1, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, batch):
        user, item, price = batch.unbind(1)
        user, item = user.long(), item.long()
        score = (self.user(user) * self.item(item)).sum(-1) + self.item_bias(item).squeeze(-1)
        return score + self.price(price.float().unsqueeze(1)).squeeze(1)


class Ratings:
    def __init__(self):
        self.quality = 2.0 * torch.randn(ITEMS + 1)
        self.prices = torch.rand(ITEMS + 1)

    def batch(self, n):
        user = torch.randint(USERS, (n,))
        item = torch.randint(1, ITEMS + 1, (n,))
        rating = self.quality[item] - self.prices[item]
        table = torch.stack([user.float(), item.float(), self.prices[item]], 1)
        return table.to(BATCH_DTYPE), rating


torch.manual_seed(2134)
ratings, model = Ratings(), TwoTower()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
for step in range(120):
    batch, rating = ratings.batch(1024)
    loss = F.mse_loss(model(batch), rating)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
