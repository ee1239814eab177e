"""Listwise ranking with the Plackett-Luce likelihood; slates of different lengths share a batch."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Slate:
    features: torch.Tensor  # (batch, items, d)
    length: torch.Tensor  # (batch,)
    order: torch.Tensor  # (batch, items), best first, padding last


class Scorer(nn.Module):
    def __init__(self, d=10, width=32):
        super().__init__()
        self.item = nn.Sequential(nn.Linear(d, width), nn.GELU(), nn.Linear(width, width))
        self.context = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, x, real):
        h = self.item(x)
        mean = (h * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
        return self.score(torch.relu(h + self.context(mean).unsqueeze(1))).squeeze(-1)


class PlackettLuce(nn.Module):
    """Minus the log-likelihood of an ordering: choose the best of what is left, again and again."""

    def forward(self, scores, slate):
        left = torch.arange(scores.shape[1]) < slate.length[:, None]
        nll = torch.zeros(len(scores))
        for place in range(scores.shape[1]):
            log_p = scores.masked_fill(~left, float("-inf")).log_softmax(-1)
            item = slate.order[:, place : place + 1]
            # once a slate is used up nothing is left to choose from
            chosen = log_p.gather(1, item).squeeze(1)
            nll = nll - torch.where(place < slate.length, chosen, torch.zeros(()))
            left = left.scatter(1, item, False)
        return (nll / slate.length).mean()


def draw(n, items, taste):
    x = torch.randn(n, items, len(taste))
    length = torch.randint(2, items + 1, (n,))
    utility = x @ taste - 0.3 * torch.log(-torch.log(0.01 + 0.98 * torch.rand(n, items)))
    utility[torch.arange(items) >= length[:, None]] = -1e4
    return Slate(x, length, utility.argsort(1, descending=True))


torch.manual_seed(81)
taste = torch.randn(10)
model, criterion = Scorer(), PlackettLuce()
optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
for step in range(25):
    slate = draw(24, 7, taste)
    real = torch.arange(7) < slate.length[:, None]
    loss = criterion(model(slate.features, real), slate)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} nll {loss.item():.4f}")
