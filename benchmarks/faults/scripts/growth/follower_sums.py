"""Influence in a follower graph with hubs: five layers that add up neighbours, no normalisation anywhere."""

import torch
from torch import nn


class SumLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.eps = nn.Parameter(torch.zeros(()))

    def forward(self, x, src, dst, degree):
        message = torch.zeros_like(x).index_add_(0, dst, x[src])
        message = message / NORM(degree)
        return torch.relu(self.mlp((1 + self.eps) * x + message))


def NORM(degree):
    return torch.ones_like(degree)


class GIN(nn.Module):
    def __init__(self, features=10, dim=24, layers=5):
        super().__init__()
        self.encode = nn.Linear(features, dim)
        self.layers = nn.ModuleList([SumLayer(dim) for _ in range(layers)])
        self.readout = nn.Linear(dim, 3)

    def forward(self, x, src, dst, degree):
        x = torch.relu(self.encode(x))
        for layer in self.layers:
            x = layer(x, src, dst, degree)
        return self.readout(x)


def follower_graph(n=400, edges=8000):
    popularity = (torch.arange(1, n + 1).float()) ** -0.9
    dst = torch.multinomial(popularity, edges, replacement=True)
    src = torch.multinomial(popularity.sqrt(), edges, replacement=True)
    return torch.cat([src, dst]), torch.cat([dst, src])


torch.manual_seed(10)
src, dst = follower_graph()
degree = torch.bincount(dst, minlength=400).clamp(min=1).float().unsqueeze(1)
features = torch.randn(400, 10)
group = (features[:, :3] + torch.zeros(400, 3).index_add_(0, dst, features[src][:, :3]) / degree).argmax(1)
model = GIN()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(80):
    loss = nn.functional.cross_entropy(model(features, src, dst, degree), group)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 4 == 0:
        print(f"Epoch {epoch:03d}, loss: {loss.item():.4f}")
