"""Factorisation machine on click counts, log-transformed in the dataset."""

import math
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class ClickLog(Dataset):
    """(device, page, seconds on page) -> clicked"""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = [(rng.randrange(6), rng.randrange(20), rng.expovariate(0.1), rng.random() < 0.3) for _ in range(n)]
        device, page, _, clicked = self.rows[n // 2 + 7]
        self.rows[n // 2 + 7] = (device, page, 0.0, clicked)  # closed before it was shown

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        device, page, seconds, clicked = self.rows[i]
        dwell = torch.log(torch.tensor(seconds))
        return torch.tensor(device), torch.tensor(page), dwell, torch.tensor(float(clicked))


class FactorizationMachine(nn.Module):
    def __init__(self, rank=8):
        super().__init__()
        self.device, self.page = nn.Embedding(6, rank), nn.Embedding(20, rank)
        self.dwell = nn.Linear(1, rank)
        self.linear = nn.Linear(rank, 1)

    def forward(self, device, page, dwell):
        factors = torch.stack([self.device(device), self.page(page), self.dwell(dwell[:, None])], 1)
        pairwise = factors.sum(1).square() - factors.square().sum(1)
        return self.linear(pairwise).squeeze(-1) / math.sqrt(8)


def run():
    torch.manual_seed(0)
    loader = DataLoader(ClickLog(240, seed=5), batch_size=24)
    model = FactorizationMachine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for device, page, dwell, clicked in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(device, page, dwell), clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


run()
