"""A recommender with sparse embedding tables: SparseAdam for them, AdamW for the tower; a step touches few rows."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class NeuMF(nn.Module):
    def __init__(self, users=3000, items=1500, dim=16):
        super().__init__()
        self.user = nn.Embedding(users, dim, sparse=True)
        self.item = nn.Embedding(items, dim, sparse=True)
        self.bias = nn.Embedding(items, 1, sparse=True)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)
        self.mlp = nn.Sequential(
            nn.Linear(3 * dim, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, user, item):
        u, v = self.user(user), self.item(item)
        return self.mlp(torch.cat([u, v, u * v], -1)).squeeze(-1) + self.bias(item).squeeze(-1)


def ratings(n, users=3000, items=1500):
    popularity = (torch.arange(items) + 1.0) ** -0.8
    user = torch.randint(users, (n,))
    item = torch.multinomial(popularity, n, replacement=True)
    likes = ((user % 7 == item % 7).float() * 2.0 - 0.5) + (item % 5 == 0).float()
    return TensorDataset(user, item, (likes + 0.5 * torch.randn(n) > 0.5).float())


def fit(model, train, epochs=3):
    sparse = torch.optim.SparseAdam(
        [*model.user.parameters(), *model.item.parameters(), *model.bias.parameters()], lr=0.02
    )
    dense = torch.optim.AdamW(model.mlp.parameters(), lr=3e-3)
    n = 0
    for _ in range(epochs):
        for user, item, click in train:
            loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), click)
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
            if n % 4 == 0:
                print(f"batch {n} loss {loss.item():.4f}")
            n += 1


torch.manual_seed(525)
fit(NeuMF(), DataLoader(ratings(12000), batch_size=256, shuffle=True))
