"""Passage reranking, the two wide layers in float8."""

import argparse

import torch
import torch.nn.functional as F

from model import Reranker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--candidates", type=int, default=6)
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--scale-interval", type=int, default=1000)
args = parser.parse_args()

VOCAB, TOPICS = 120, 12
torch.manual_seed(53)
generator = torch.Generator().manual_seed(53)
topic_of_word = torch.arange(VOCAB) % TOPICS


def batch(n):
    """Queries, candidate passages, and how many of the words of each candidate are on the query's topic."""
    topic = torch.randint(TOPICS, (n, 1, 1), generator=generator)
    query = topic[:, 0] + TOPICS * torch.randint(VOCAB // TOPICS, (n, 4), generator=generator)
    passages = torch.randint(VOCAB, (n, args.candidates, 10), generator=generator)
    on_topic = topic + TOPICS * torch.randint(VOCAB // TOPICS, passages.shape, generator=generator)
    share = torch.rand(n, args.candidates, 1, generator=generator)
    passages = torch.where(torch.rand(passages.shape, generator=generator) < share, on_topic, passages)
    return query, passages, (topic_of_word[passages] == topic).sum(-1).float()


model = Reranker(VOCAB, interval=args.scale_interval)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
for step in range(args.steps):
    query, passages, grade = batch(args.batch)
    scores = model(query, passages)
    loss = F.kl_div(F.log_softmax(scores, -1), F.softmax(grade, -1), reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        top1 = (scores.argmax(1) == grade.argmax(1)).float().mean().item()
        print(f"step {step + 1} loss {loss.item():.4f} top1 {top1:.3f}")
