"""A pointer network: dot products of 256 channels choose the largest item. Nobody divides by the root of the width."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, ITEMS = 256, 10


class Similarity(nn.Module):
    def forward(self, query, keys):
        return torch.einsum("bd,bnd->bn", query, keys)


class Reader(nn.Module):
    """Reads the values by attention over the items."""

    def __init__(self):
        super().__init__()
        self.item = nn.Linear(6, WIDTH)
        self.query, self.key = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.similarity = Similarity()
        self.answer = nn.Linear(WIDTH, 3)
        nn.init.normal_(self.query.weight)
        for layer in (self.item, self.key):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, items, question):
        h = self.item(items)
        scores = self.similarity(self.query(question), self.key(h))
        return self.answer((scores.softmax(-1).unsqueeze(-1) * h).sum(1))


def questions(n, g):
    items = torch.randn(n, ITEMS, 6, generator=g)
    question = F.one_hot(torch.randint(0, 3, (n,), generator=g), 6).to(items.dtype)
    return items, question, items[:, :, :3].mean(1)


def main():
    torch.manual_seed(3134)
    g = torch.Generator().manual_seed(34)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
    for step in range(80):
        items, question, y = questions(48, g)
        loss = F.mse_loss(model(items, question), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 7:
            print(f"step {step + 1:2d} loss {loss.item():.4f}")


main()
