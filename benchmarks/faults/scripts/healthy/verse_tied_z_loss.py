"""A tied language model whose logits are large by design: embeddings of unit variance, held by a z-loss."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Verse(nn.Module):
    def __init__(self, vocab=80, dim=48, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))
                for _ in range(layers)
            ]
        )
        self.gates = nn.Parameter(torch.zeros(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for gate, layer in zip(self.gates, self.layers):
            x = x + gate * layer(x)
        return self.head(self.norm(x))


def rate(step, warmup=30, total=250, top=6e-3):
    if step < warmup:
        return top * step / warmup
    return top * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


torch.manual_seed(106)
follows = torch.randint(80, (80, 2))
model = Verse()
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
for step in range(250):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    ids = torch.randint(80, (128,))
    target = follows[ids, torch.randint(2, (128,))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids)
    logits = logits.float()
    z = logits.logsumexp(-1)
    loss = F.cross_entropy(logits, target, label_smoothing=0.1) + 1e-4 * z.square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
