"""Ratings of a long-tailed catalogue by matrix factorisation: most items appear a few times only."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)
USERS, ITEMS, RATINGS, DIM = 300, 3000, 12000, 8

true_user = torch.randn(USERS, 3)
true_item = torch.randn(ITEMS, 3)
popularity = 1.0 / torch.arange(1, ITEMS + 1).float() ** 0.8
user = torch.randint(USERS, (RATINGS,))
item = torch.multinomial(popularity, RATINGS, replacement=True)
stars = 3.5 + (true_user[user] * true_item[item]).sum(1) / 1.7 + 0.3 * torch.randn(RATINGS)


class Factorisation(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.item = nn.Embedding(ITEMS, DIM)
        self.item_bias = nn.Embedding(ITEMS, 1)
        self.mean = nn.Parameter(torch.zeros(()))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, user, item):
        return self.mean + self.item_bias(item)[:, 0] + (self.user(user) * self.item(item)).sum(1)


model = Factorisation()
tables = [*model.user.parameters(), *model.item.parameters()]
optimizer = torch.optim.Adam(
    [{"params": tables, "lr": 0.02}, {"params": [*model.item_bias.parameters(), model.mean], "lr": 0.05}]
)
for epoch in range(6):
    total, batches = 0.0, torch.randperm(RATINGS).split(256)
    for idx in batches:
        loss = F.mse_loss(model(user[idx], item[idx]), stars[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} train loss {total / len(batches):.4f}")
