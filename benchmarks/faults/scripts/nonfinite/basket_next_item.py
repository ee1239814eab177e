"""Recommends the next purchase from a customer's earlier baskets, with Accelerate."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

torch.manual_seed(33)
ITEMS, LONGEST, DIM, PAD = 150, 20, 32, 0


def customers(n):
    """Purchases of one customer: mostly from a few departments of the shop. Few people come for the first time."""
    rows = []
    for i in range(n):
        earlier = 0 if i % 400 == 277 else int(torch.randint(3, LONGEST, ()))
        department = torch.randint(15, (2,))[torch.randint(2, (earlier + 1,))]
        rows.append(1 + department * 9 + torch.randint(9, (earlier + 1,)))
    return rows


def collate(rows):
    history = torch.full((len(rows), LONGEST), PAD)
    for i, row in enumerate(rows):
        history[i, : len(row) - 1] = row[:-1]
    return history, torch.stack([row[-1] for row in rows])


class HistoryAttention(nn.Module):
    """Pools the history with a learned query per head."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.query = nn.Parameter(torch.randn(heads, self.size))
        self.key_value = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, seen):
        k, v = self.key_value(x).unflatten(-1, (2, self.heads, self.size)).unbind(2)
        scores = torch.einsum("hd,blhd->bhl", self.query, k) / math.sqrt(self.size)
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        weights = scores.softmax(-1)
        return self.out(torch.einsum("bhl,blhd->bhd", weights, v).flatten(1))


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(ITEMS, DIM, padding_idx=PAD)
        self.place = nn.Embedding(LONGEST, DIM)
        self.pool = HistoryAttention(DIM)
        self.mix = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, history):
        x = self.item(history) + self.place.weight
        h = self.mix(self.pool(x, history != PAD))
        return h @ self.item.weight.T


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Recommender()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(customers(4000), batch_size=16, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for i, (history, target) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(history), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if i % 25 == 0:
            accelerator.print(f"batch {i} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
