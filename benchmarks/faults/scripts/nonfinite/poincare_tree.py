"""Poincare embeddings of a small taxonomy (Nickel and Kiela 2017)."""

import torch
from torch import nn


class PoincareEmbedding(nn.Module):
    def __init__(self, n, dim=2):
        super().__init__()
        self.points = nn.Embedding(n, dim)
        nn.init.uniform_(self.points.weight, -1e-2, 1e-2)

    def distance(self, u, v):
        gap = (u - v).square().sum(-1)
        bound = (1 - u.square().sum(-1)) * (1 - v.square().sum(-1))
        return torch.acosh(1 + 2 * gap / bound)

    def forward(self, child, candidates):
        return self.distance(self.points(child).unsqueeze(1), self.points(candidates))

    @torch.no_grad()
    def project(self):
        norm = self.points.weight.norm(dim=-1, keepdim=True)
        self.points.weight.copy_(
            torch.where(norm > 0.99, self.points.weight / norm.clamp(min=1e-9) * 0.99, self.points.weight)
        )


def main():
    torch.manual_seed(6)
    nodes = 31
    parent = (torch.arange(nodes) - 1).clamp(min=0) // 2
    model = PoincareEmbedding(nodes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(30):
        child = torch.randint(1, nodes, (6,))
        negatives = torch.randint(nodes, (6, 3))
        candidates = torch.cat([parent[child].unsqueeze(1), negatives], 1)
        loss = nn.functional.cross_entropy(-model(child, candidates), torch.zeros(6, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.project()
        if step % 10 == 0:
            print(f"step {step}: {loss.item():.4f}")


main()
