import torch
import torch.nn as nn
import torch.nn.functional as F

from float8 import Float8Linear


class Reranker(nn.Module):
    """Scores (query, passage) pairs given as bags of words."""

    def __init__(self, vocab, dim=48, interval=1):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.fc1 = Float8Linear(3 * dim, 128, interval=interval)
        self.fc2 = Float8Linear(128, 64, interval=interval)
        self.score = nn.Linear(64, 1)

    def forward(self, query, passage):
        q, p = self.embed(query).sum(-2), self.embed(passage).sum(-2)
        q = q.unsqueeze(1).expand_as(p)
        h = F.relu(self.fc1(torch.cat([q, p, q * p], -1)))
        return self.score(F.relu(self.fc2(h)))[..., 0]
