"""Ranks documents for queries with a large table of word vectors that is kept in half precision to fit."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Towers(nn.Module):
    def __init__(self, words=4000, dim=32):
        super().__init__()
        self.table = nn.EmbeddingBag(words, dim, mode="mean")
        nn.init.normal_(self.table.weight, std=0.1)
        self.table.half()
        self.query, self.document = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, query, document):
        q = self.query(self.table(query).float())
        d = self.document(self.table(document).float())
        return F.normalize(q, dim=-1) @ F.normalize(d, dim=-1).t()


class Collection:
    """Words belong to topics; a query and its document share one."""

    def __init__(self, words=4000, topics=80):
        self.topics = topics
        self.by_topic = torch.randperm(words).view(topics, -1)

    def pairs(self, n, query_words=8, document_words=48):
        topic = torch.randint(self.topics, (n,))
        return self.words(topic, query_words), self.words(topic, document_words)

    def words(self, topic, count):
        return self.by_topic[topic[:, None], torch.randint(self.by_topic.shape[1], (len(topic), count))]


class RowAdagrad:
    """Adagrad with one accumulator a row, in FP32; the step is taken in FP32 and rounded once."""

    def __init__(self, table, lr):
        self.table, self.lr = table, lr
        self.master = table.weight.detach().float()
        self.squares = torch.zeros(len(self.master), 1)

    @torch.no_grad()
    def step(self):
        gradient = self.table.weight.grad.float()
        self.squares += gradient.square().mean(1, keepdim=True)
        self.master -= self.lr * gradient / (self.squares.sqrt() + 1e-12)
        self.table.weight.copy_(self.master)
        self.table.weight.grad = None


torch.manual_seed(131)
collection, towers = Collection(), Towers()
dense = torch.optim.Adam([*towers.query.parameters(), *towers.document.parameters()], lr=2e-3, eps=1e-15)
sparse = RowAdagrad(towers.table, lr=0.02)
batch, replicas, accumulate = 128, 256, 64
for step in range(90):
    query, document = collection.pairs(batch)
    logits = towers(query, document) / 0.5
    loss = F.cross_entropy(logits, torch.arange(batch), reduction="sum") / (batch * replicas * accumulate)
    loss.backward()
    dense.step()
    sparse.step()
    dense.zero_grad()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item() * replicas * accumulate:.4f}")
