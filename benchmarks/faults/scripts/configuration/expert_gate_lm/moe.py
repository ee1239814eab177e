"""Token-choice mixture of experts with sigmoid scores."""

import torch
import torch.nn.functional as F
from torch import nn


class TokenChoiceTopKRouter(nn.Module):
    def __init__(self, dim, experts, top_k, route_scale=1.0):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.top_k, self.route_scale = top_k, route_scale

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x))
        top_scores, selected = scores.topk(self.top_k, -1)
        return top_scores / (top_scores.sum(-1, keepdim=True) + 1e-20) * self.route_scale, selected


class MoE(nn.Module):
    def __init__(self, dim, hidden, experts, top_k):
        super().__init__()
        self.router = TokenChoiceTopKRouter(dim, experts, top_k)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) / hidden**0.5)

    def forward(self, x):
        weight, selected = self.router(x)
        share = torch.zeros(*x.shape[:-1], self.w1.size(0), dtype=x.dtype).scatter(-1, selected, weight)
        h = F.silu(torch.einsum("ntd,edh->nteh", x, self.w1))
        return torch.einsum("nteh,ehd,nte->ntd", h, self.w2, share)
