"""Prices in dollars, so that the loss begins at 1e11; inputs are normalised, Adam does not care, and the model learns."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class PriceModel(nn.Module):
    def __init__(self, n_features=10, n_towns=30):
        super().__init__()
        self.town = nn.Embedding(n_towns, 6)
        self.bn = nn.BatchNorm1d(n_features)
        self.net = nn.Sequential(nn.Linear(n_features + 6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.out = nn.Linear(64, 1)

    def forward(self, features, town):
        x = torch.cat([self.bn(features), self.town(town)], dim=1)
        return self.out(self.net(x)).squeeze(1)


def houses(n):
    area = 40 + 160 * torch.rand(n)
    year = torch.randint(1900, 2024, (n,)).float()
    other = torch.randn(n, 8) * torch.logspace(-2, 3, 8)
    town = torch.randint(30, (n,))
    price = area * (1500 + 80 * town) + 400 * (year - 1900) + 2e4 * torch.randn(n)
    return TensorDataset(torch.cat([area[:, None], year[:, None], other], 1), town, price)


torch.manual_seed(528)
train_set, test_set = random_split(houses(2200), [2000, 200])
train_loader = DataLoader(train_set, batch_size=50, shuffle=True)
test_loader = DataLoader(test_set, batch_size=200)
model = PriceModel()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
for epoch in range(8):
    model.train()
    for i, (features, town, price) in enumerate(train_loader):
        loss = criterion(model(features, town), price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            print(f"epoch {epoch} batch {i} loss {loss.item():.6e}")
    scheduler.step()
    model.eval()
    with torch.no_grad():
        for features, town, price in test_loader:
            print(f"test RMSE {math.sqrt(criterion(model(features, town), price).item()):.0f} dollars")
