"""Next basket from the last ones with nn.EmbeddingBag: new customers have empty bags, and metrics that are 0 / 0."""

import math

import torch
from torch import nn

PRODUCTS = 120


class BasketModel(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.mean = nn.EmbeddingBag(PRODUCTS, width, mode="mean")
        self.largest = nn.EmbeddingBag(PRODUCTS, width, mode="max")
        self.head = nn.Sequential(nn.Linear(2 * width, 48), nn.ReLU(), nn.Linear(48, PRODUCTS))

    def forward(self, products, offsets):
        return self.head(torch.cat([self.mean(products, offsets), self.largest(products, offsets)], -1))


def customers(n):
    taste = torch.randint(6, (n,))
    sizes = torch.randint(0, 6, (n,)) * (torch.rand(n) > 0.25)  # a quarter of them is new
    bags = [taste[i] * 20 + torch.randint(20, (int(sizes[i]),)) for i in range(n)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
    target = torch.zeros(n, PRODUCTS)
    for i in range(n):
        target[i, taste[i] * 20 + torch.randint(20, (int(torch.randint(0, 4, ())),))] = 1.0
    return torch.cat(bags).long(), offsets, target, sizes


@torch.no_grad()
def evaluate(model):
    products, offsets, target, sizes = customers(40)
    scores = model(products, offsets)
    seen = torch.zeros(40, PRODUCTS, dtype=torch.bool)
    rows = torch.repeat_interleave(torch.arange(40), sizes)
    seen[rows, products] = True
    ranked = scores.masked_fill(seen, -math.inf).topk(10).indices
    hits = target.gather(1, ranked).sum(1)
    recall = hits / target.sum(1)  # NaN for customers who bought nothing
    lift = hits / (hits * seen.sum(1))  # NaN and inf, reported by nobody
    return recall.nanmean().item(), lift.mean().item()


def main():
    torch.manual_seed(102)
    model = BasketModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    best = -math.inf
    for step in range(60):
        products, offsets, target, _ = customers(32)
        bought = target.sum(1)
        logp = model(products, offsets).log_softmax(-1)
        loss = -(target * logp).sum() / bought.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            recall, lift = evaluate(model)
            best = max(best, recall)
            print(f"step {step} loss {loss.item():.4f} recall {recall:.3f} best {best:.3f} lift {lift}")


if __name__ == "__main__":
    main()
