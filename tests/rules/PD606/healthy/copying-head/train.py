"""One head learns to reverse a sequence: its softmax becomes one-hot, which is what it is for."""

import math

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 64


class Reverse(nn.Module):
    def __init__(self, width=64, vocabulary=32, length=16):
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.position = nn.Parameter(torch.randn(length, width))

    def forward(self, tokens):
        scores = self.query(self.position) @ self.key(self.position).T / math.sqrt(self.position.shape[-1])
        weights = scores.expand(len(tokens), -1, -1).softmax(-1)
        return self.out(weights @ self.embedding(tokens))


torch.manual_seed(0)
model = Reverse()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(STEPS):
    tokens = torch.randint(32, (32, 16))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
