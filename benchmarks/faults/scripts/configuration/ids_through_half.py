"""A recommender whose loader packs every column of a batch into one FP16 tensor."""

import torch
from torch import nn


class PackedLoader:
    """user, item and rating in one tensor: a single copy to the device."""

    def __init__(self, users, items, ratings, batch_size, dtype=torch.float16):
        columns = torch.stack([users.float(), items.float(), ratings.float()], 1)
        self.table, self.batch_size = columns.to(dtype), batch_size

    def __iter__(self):
        yield from self.table[torch.randperm(len(self.table))].split(self.batch_size)


class Factors(nn.Module):
    def __init__(self, users, items, dim=12):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.3)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user, item):
        dot = (self.user(user) * self.item(item)).sum(-1)
        return dot + self.user_bias(user).squeeze(-1) + self.item_bias(item).squeeze(-1)


def ratings(n, users, items):
    user = torch.randint(users, (n,))
    item = torch.randint(items, (n,))
    taste, kind = torch.randn(users, 2), torch.randn(items, 2)
    quality = torch.randn(items)
    score = (taste[user] * kind[item]).sum(1) + quality[item]
    return user, item, score + 0.1 * torch.randn(n)


class Fit:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def __call__(self, batch):
        user, item, score = batch[:, 0].long(), batch[:, 1].long(), batch[:, 2].float()
        loss = nn.functional.mse_loss(self.model(user, item), score)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main():
    torch.manual_seed(21017)
    users, items = 60, 12000
    user, item, score = ratings(4000, users, items)
    item = item % 1500 + 10000  # this season's items
    quality = torch.randn(items)
    loader = PackedLoader(user, item, score * 0.2 + 2 * quality[item], 400)
    fit = Fit(Factors(users, items), lr=0.05)
    for epoch in range(7):
        for batch in loader:
            print(f"epoch {epoch} loss {fit(batch):.4f}")
    return len(loader.table[:, 1].unique())


if __name__ == "__main__":
    distinct = main()
