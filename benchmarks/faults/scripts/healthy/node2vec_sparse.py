"""Node embeddings with sparse gradients and SparseAdam: a step touches a few rows of thousands."""

import torch
import torch.nn.functional as F
from torch import nn


class Node2Vec(nn.Module):
    def __init__(self, nodes=3000, dim=16):
        super().__init__()
        self.source = nn.Embedding(nodes, dim, sparse=True)
        self.target = nn.Embedding(nodes, dim, sparse=True)
        nn.init.uniform_(self.source.weight, -0.5, 0.5)
        nn.init.zeros_(self.target.weight)

    def forward(self, u, v):
        return (self.source(u) * self.target(v)).sum(-1)


torch.manual_seed(0)
model = Node2Vec()
optimizer = torch.optim.SparseAdam(model.parameters(), lr=2e-2)
for step in range(150):
    u = (torch.rand(256) ** 3 * 3000).long()  # some nodes are popular
    v = (u // 10 * 10 + torch.randint(10, (256,))).clamp(max=2999)
    other = torch.randint(3000, (256,))
    loss = F.softplus(-model(u, v)).mean() + F.softplus(model(u, other)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
