"""Skip-gram vectors of streets from taxi routes: sparse gradients, most rows untouched, output vectors of zero."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SkipGram(nn.Module):
    def __init__(self, streets=3000, dim=24):
        super().__init__()
        self.inner = nn.Embedding(streets, dim, sparse=True)
        self.outer = nn.Embedding(streets, dim, sparse=True)
        nn.init.uniform_(self.inner.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.outer.weight)

    def forward(self, centre, context, negative):
        c = self.inner(centre)
        positive = (c * self.outer(context)).sum(-1)
        others = torch.einsum("bd,bkd->bk", c, self.outer(negative))
        return -(F.logsigmoid(positive) + F.logsigmoid(-others).sum(-1)).mean()


class Routes:
    """A route stays in its quarter; few streets see most of the traffic."""

    def __init__(self, streets=3000, quarters=30):
        self.quarters, self.size = quarters, streets // quarters
        self.traffic = 1.0 / (1 + torch.arange(self.size, dtype=torch.float32))

    def draw(self, quarter):
        return quarter * self.size + torch.multinomial(self.traffic, len(quarter), replacement=True)

    def batch(self, n, k=5):
        quarter = torch.randint(self.quarters, (n,))
        negative = torch.stack([self.draw(torch.randint(self.quarters, (n,))) for _ in range(k)], 1)
        return self.draw(quarter), self.draw(quarter), negative


def train(steps=200):
    torch.manual_seed(353)
    routes, model = Routes(), SkipGram()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    for step in range(steps):
        loss = model(*routes.batch(256))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


train()
