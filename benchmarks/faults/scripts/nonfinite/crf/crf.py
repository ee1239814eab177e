"""Linear-chain CRF with forbidden transitions (BIO tags)."""

import torch
from torch import nn

NEVER = float("-inf")


def logsumexp(x, dim):
    top = x.max(dim, keepdim=True).values
    return (x - top).exp().sum(dim).log() + top.squeeze(dim)


class CRF(nn.Module):
    def __init__(self, tags, forbidden):
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(len(tags), len(tags)))
        mask = torch.zeros(len(tags), len(tags), dtype=torch.bool)
        for a, b in forbidden:
            mask[tags.index(a), tags.index(b)] = True
        self.register_buffer("forbidden", mask)

    def partition(self, emissions):
        transitions = self.transitions.masked_fill(self.forbidden, NEVER)
        alpha = emissions[:, 0]
        for t in range(1, emissions.size(1)):
            alpha = logsumexp(alpha[:, :, None] + transitions, 1) + emissions[:, t]
        return torch.logsumexp(alpha, 1)

    def score(self, emissions, tags):
        s = emissions.gather(2, tags[..., None]).squeeze(-1).sum(1)
        return s + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)

    def forward(self, emissions, tags):
        return (self.partition(emissions) - self.score(emissions, tags)).mean()
