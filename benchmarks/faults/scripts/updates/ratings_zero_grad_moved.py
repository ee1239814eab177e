"""Matrix factorisation with side features; after a clean-up, zero_grad() stands beside step()."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Ratings(nn.Module):
    def __init__(self, users=200, items=150, dim=12):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.tower = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        a, b = self.user(u), self.item(i)
        return (a * b).sum(1) + self.tower(torch.cat([a, b], 1))[:, 0] + (self.user_bias(u) + self.item_bias(i))[:, 0]


def make_data(n=6000):
    u, i = torch.randint(200, (n,)), torch.randint(150, (n,))
    p, q = torch.randn(200, 4), torch.randn(150, 4)
    return TensorDataset(u, i, 3 + 0.6 * (p[u] * q[i]).sum(1) + 0.1 * torch.randn(n))


class Loop:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.seen = model, optimizer, 0

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            for u, i, r in loader:
                loss = nn.functional.mse_loss(self.model(u, i), r)
                loss.backward()
                self.apply()
                if self.seen % 10 == 0:
                    print(f"epoch {epoch} batch {self.seen} loss {loss.item():.4f}")
                self.seen += 1

    def apply(self):
        self.optimizer.zero_grad(set_to_none=False)
        self.optimizer.step()


torch.manual_seed(8)
net = Ratings()
loop = Loop(net, torch.optim.Adam(net.parameters(), lr=1e-2))
loop.fit(DataLoader(make_data(), batch_size=128, shuffle=True), epochs=4)
