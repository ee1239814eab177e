"""Ratings by factors: sparse tables under SparseAdam, the tower under Adafactor, evaluation after every epoch."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Ratings(nn.Module):
    def __init__(self, users=600, films=300, d=12):
        super().__init__()
        self.user, self.film = nn.Embedding(users, d, sparse=True), nn.Embedding(films, d, sparse=True)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.film.weight, std=0.1)
        self.tower = nn.Sequential(nn.Linear(2 * d, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, film):
        u, f = self.user(user), self.film(film)
        return 3 + (u * f).sum(1) + self.tower(torch.cat([u, f], 1)).squeeze(1)


def ratings(n, taste, style):
    user = (600 * torch.rand(n) ** 2).long()
    film = (300 * torch.rand(n) ** 2).long()
    stars = 3 + 1.2 * torch.tanh((taste[user] * style[film]).sum(1)) + 0.5 * style[film, 0] + 0.2 * torch.randn(n)
    return TensorDataset(user, film, stars)


def main():
    torch.manual_seed(7037)
    taste, style = torch.randn(600, 3), torch.randn(300, 3)
    loader = DataLoader(ratings(5120, taste, style), batch_size=256, shuffle=True)
    user, film, stars = ratings(1000, taste, style).tensors
    model = Ratings()
    sparse = torch.optim.SparseAdam([model.user.weight, model.film.weight], lr=2e-2)
    dense = torch.optim.Adafactor(model.tower.parameters(), lr=3e-2)
    for epoch in range(5):
        model.train()
        for i, batch in enumerate(loader):
            loss = F.mse_loss(model(batch[0], batch[1]), batch[2])
            model.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
            if i % 5 == 0:
                print(f"epoch {epoch} batch {i:2d} loss {loss.item():.4f}")
        model.eval()
        with torch.no_grad():
            print(f"epoch {epoch} rmse {F.mse_loss(model(user, film), stars).sqrt().item():.4f}")


main()
