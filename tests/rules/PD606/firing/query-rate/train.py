"""Queries and keys have a learning rate of their own, sixty times that of the rest: attention logits grow."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 57


class Attention(nn.Module):
    """Causal, four heads."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, width=32, vocabulary=32, length=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        return self.head(x + self.attention(self.norm(x)))


torch.manual_seed(0)
model = Model()
fast = [p for name, p in model.named_parameters() if "query" in name or "key" in name]
rest = [p for name, p in model.named_parameters() if "query" not in name and "key" not in name]
optimizer = torch.optim.AdamW([{"params": rest}, {"params": fast, "lr": 6.4e-2}], lr=1e-3)
for step in range(STEPS):
    tokens = torch.randint(32, (8, 17))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
