"""Podcast tags from title words: a large sparse embedding (SparseAdam) under a dense head; most rows are never touched."""

import torch
from torch import nn

torch.manual_seed(202)
WORDS, TAGS = 20000, 12
popularity = 1.0 / torch.arange(1, WORDS + 1) ** 1.1
tag_of = torch.randint(TAGS, (WORDS,))


class TagNet(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, d, mode="mean", sparse=True)
        self.head = nn.Linear(d, TAGS)

    def forward(self, ids):
        return self.head(self.bag(ids))


def titles(n, length=8):
    ids = torch.multinomial(popularity, n * length, replacement=True).view(n, length)
    y = torch.zeros(n, TAGS).scatter_(1, tag_of[ids], 1.0)
    return ids, y


net = TagNet()
sparse = torch.optim.SparseAdam(net.bag.parameters(), lr=3e-2)
dense = torch.optim.Adam(net.head.parameters(), lr=1e-2)
for step in range(120):
    ids, y = titles(64)
    loss = nn.functional.binary_cross_entropy_with_logits(net(ids), y)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
