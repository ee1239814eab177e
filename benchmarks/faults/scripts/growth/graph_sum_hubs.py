"""Node labels in a network with hubs, FP32: ten rounds of summing the neighbours, without a norm between them."""

import torch
import torch.nn.functional as F
from torch import nn


class Round(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.own, self.others = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)

    def forward(self, x, adjacency):
        return F.relu(self.own(x) + self.others(adjacency @ x))


class GIN(nn.Module):
    def __init__(self, features=12, dim=24, rounds=10, classes=3):
        super().__init__()
        self.inp = nn.Linear(features, dim)
        self.rounds = nn.ModuleList(Round(dim) for _ in range(rounds))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x, adjacency):
        x = F.relu(self.inp(x))
        for one in self.rounds:
            x = one(x, adjacency)
        return self.out(self.norm(x))


def network(n=150):
    label = torch.randint(3, (n,))
    popular = 0.05 + 0.6 * torch.rand(n) ** 4
    same = (label[:, None] == label[None]).float()
    likely = (popular[:, None] + popular[None]) * (0.3 + 0.7 * same)
    upper = torch.triu((torch.rand(n, n) < likely).float(), 1)
    adjacency = upper + upper.T
    x = F.one_hot(label, 12).float() + torch.randn(n, 12)
    return x, adjacency, label


torch.manual_seed(15)
model = GIN()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x, adjacency, label = network()
for step in range(120):
    train = torch.rand(len(label)) < 0.6
    loss = F.cross_entropy(model(x, adjacency)[train], label[train])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
