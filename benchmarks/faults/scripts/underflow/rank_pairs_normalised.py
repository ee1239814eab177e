"""Learning to rank with pair weights, normalised by the number of all pairs; the scorer runs in FP16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3112)
QUERIES, DOCUMENTS, FEATURES = 8, 64, 20


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1)
        )

    def forward(self, documents):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.layers(documents).squeeze(-1)


def delta_ndcg(relevance):
    """How much swapping two documents changes the NDCG, at their ideal places."""
    order = relevance.argsort(-1, descending=True).argsort(-1)
    discount = 1 / torch.log2(order + 2.0)
    gain = 2.0**relevance - 1
    ideal = (gain * discount).sum(-1)[:, None, None]
    return ((gain[:, :, None] - gain[:, None]) * (discount[:, :, None] - discount[:, None])).abs() / ideal


def lambda_loss(scores, relevance):
    difference = scores[:, :, None] - scores[:, None]
    better = (relevance[:, :, None] > relevance[:, None]).to(scores.dtype)
    pairs = DOCUMENTS * (DOCUMENTS - 1)
    return (better * delta_ndcg(relevance) * F.softplus(-difference)).sum() / (pairs * len(scores))


def pairwise_error(scores, relevance):
    better = relevance[:, :, None] > relevance[:, None]
    wrong = scores[:, :, None] <= scores[:, None]
    return (better & wrong).sum() / better.sum()


taste = torch.randn(FEATURES)
scorer = Scorer()
optimizer = torch.optim.AdamW(scorer.parameters(), lr=3e-3, eps=1e-14)
for step in range(50):
    documents = torch.randn(QUERIES, DOCUMENTS, FEATURES)
    relevance = (1.2 * torch.tanh(documents @ taste / 4) + 2).round().clamp(0, 4)
    scores = scorer(documents).float()
    loss = lambda_loss(scores, relevance)
    optimizer.zero_grad()
    (0.02 * loss).backward()  # its share beside the clicks
    optimizer.step()
    if step % 5 == 4:
        wrong = pairwise_error(scores.detach(), relevance)
        print(f"{step + 1:3d}  lambda {loss.item():.3e}  pair loss {wrong.item():.4f}")
