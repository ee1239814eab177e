"""Two-tower recommender on an interaction log read from CSV."""

import csv
import io
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def interaction_log(rows=320):
    rng = random.Random(20)
    lines = ["user,item,age,price,rating"]
    for i in range(rows):
        age = "" if i == 203 else str(rng.randint(18, 70))  # one user never told their age
        lines.append(f"{rng.randrange(40)},{rng.randrange(60)},{age},{rng.uniform(1, 90):.2f},{rng.randint(1, 5)}")
    return "\n".join(lines)


class Interactions(Dataset):
    def __init__(self, text):
        rows = list(csv.DictReader(io.StringIO(text)))
        self.users = torch.tensor([int(r["user"]) for r in rows])
        self.items = torch.tensor([int(r["item"]) for r in rows])
        self.dense = torch.tensor([[float(r["age"] or "nan") / 50, float(r["price"]) / 40] for r in rows])
        self.ratings = torch.tensor([float(r["rating"]) for r in rows])

    def __len__(self):
        return len(self.ratings)

    def __getitem__(self, i):
        return {"user": self.users[i], "item": self.items[i], "dense": self.dense[i]}, self.ratings[i]


class TwoTower(nn.Module):
    def __init__(self, users=40, items=60, dim=16):
        super().__init__()
        self.user_emb = nn.Embedding(users, dim)
        self.item_emb = nn.Embedding(items, dim)
        self.dense_mlp = nn.Sequential(nn.Linear(2, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, *, user, item, dense):
        return self.top(torch.cat([self.user_emb(user), self.item_emb(item), self.dense_mlp(dense)], -1)).squeeze(-1)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Interactions(interaction_log()), batch_size=32, shuffle=False)
    model = TwoTower()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for epoch in range(2):
        for batch, ratings in loader:
            loss = nn.functional.smooth_l1_loss(model(**batch), ratings)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
