"""Which second-hand books are bought together: sparse gradients of a large table, of which a batch touches few rows."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BOOKS, DIM, SHELVES = 20_000, 24, 12


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.books = nn.Embedding(BOOKS, DIM, sparse=True)
        self.popular = nn.Embedding(BOOKS, 1, sparse=True)
        self.project = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        nn.init.normal_(self.books.weight, std=0.1)
        nn.init.zeros_(self.popular.weight)

    def forward(self, a, b):
        score = (self.project(self.books(a)) * self.books(b)).sum(-1)
        return score + self.popular(b).squeeze(-1)


def baskets(shelf, n=512):
    zipf = (torch.rand(2, n) ** 4 * 2000).long()
    a, b = zipf * 10
    return a, b, (shelf[a] == shelf[b]).float()


if __name__ == "__main__":
    torch.manual_seed(88)
    shelf = torch.randint(3, (BOOKS,))
    net = Pairs()
    tables = [net.books.weight, net.popular.weight]
    sparse = torch.optim.SparseAdam(tables, lr=2e-2)
    dense = torch.optim.Adam(net.project.parameters(), lr=2e-3)
    for step in range(140):
        a, b, together = baskets(shelf)
        loss = F.binary_cross_entropy_with_logits(net(a, b), together)
        for opt in (sparse, dense):
            opt.zero_grad()
        loss.backward()
        for opt in (sparse, dense):
            opt.step()
        if step % 7 == 0:
            print("step", step, "loss", round(loss.item(), 4))
