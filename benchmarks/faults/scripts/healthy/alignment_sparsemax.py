"""Attention by sparsemax: probabilities are exactly zero for most keys, and so are their gradients."""

import torch
from torch import nn


def sparsemax(z):
    s = z.sort(-1, descending=True).values
    k = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    cumulative = s.cumsum(-1)
    support = (1 + k * s > cumulative).sum(-1, keepdim=True)
    tau = (cumulative.gather(-1, support - 1) - 1) / support
    return torch.relu(z - tau)


class Aligner(nn.Module):
    def __init__(self, words=50, dim=32, length=20):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.position = nn.Embedding(length, dim)
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, words)

    def forward(self, ids):
        where = self.position.weight
        attention = sparsemax(self.query(where) @ self.key(where).t() / where.shape[1])
        return self.out(attention @ self.embed(ids))


torch.manual_seed(108)
reorder = torch.randperm(20)
lexicon = torch.randperm(50)
model = Aligner()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(250):
    ids = torch.randint(50, (32, 20))
    target = lexicon[ids[:, reorder]]
    loss = nn.functional.cross_entropy(model(ids).transpose(1, 2), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"[{step}] loss {loss.item():.4f}")
