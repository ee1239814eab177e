"""Resumes a click model; the groups are listed dense layers first now, but load_state_dict gives out rates by position."""

import torch
import torch.nn.functional as F
from torch import nn


class ClickNet(nn.Module):
    def __init__(self, users=60, items=80, d=12):
        super().__init__()
        self.tables = nn.ModuleDict({"user": nn.Embedding(users, d), "item": nn.Embedding(items, d), "hour": nn.Embedding(24, d), "shop": nn.Embedding(9, d)})  # fmt: skip
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=0.3)
        self.deep = nn.Linear(4 * d, 48)
        self.click = nn.Linear(48, 1)

    def forward(self, ids):
        x = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables.values())], 1)
        return self.click(torch.tanh(self.deep(x))).squeeze(-1)

    def dense(self):
        return [*self.deep.parameters(), *self.click.parameters()]


def log(n):
    ids = torch.stack([torch.randint(k, (n,)) for k in (60, 80, 24, 9)], 1)
    score = (
        1.5 * torch.sin(ids[:, 0].float()) * torch.cos(ids[:, 1].float())
        + torch.sin(ids[:, 2] / 4)
        + 0.2 * (ids[:, 3] - 4)
    )
    return ids, torch.bernoulli(torch.sigmoid(3 * score))


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        ids, clicked = log(128)
        loss = F.binary_cross_entropy_with_logits(model(ids), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f}")


torch.manual_seed(411)
model = ClickNet()
# a row of a table is seen in few batches, and a batch is a mean: tables need far higher rates
optimizer = torch.optim.SGD([{"params": model.tables.parameters(), "lr": 30.0}, {"params": model.dense(), "lr": 0.2}])
train(model, optimizer, 40)
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

# -- the next day ------------------------------------------------------------------------------------------------------
model = ClickNet()
model.load_state_dict(saved["model"])
optimizer = torch.optim.SGD([{"params": model.dense()}, {"params": model.tables.parameters()}], lr=0.2)
optimizer.load_state_dict(saved["optimizer"])
train(model, optimizer, 40, first=40)
