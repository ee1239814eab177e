"""Attention with causal and padding masks of -inf, and a masked maximum over time: every one of them on purpose."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, TIME, STEPS = 24, 16, 10, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mask = nn.Identity()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, padding):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        hidden = torch.ones(TIME, TIME, dtype=torch.bool).triu(1) | padding.unsqueeze(1)
        scores = self.mask(scores.masked_fill(hidden, float("-inf")))
        return self.softmax(scores) @ v


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.attention = Attention()
        self.pool = nn.AdaptiveMaxPool1d(1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.token(tokens)
        x = x + self.attention(x, padding)
        x = x.masked_fill(padding.unsqueeze(-1), float("-inf"))
        return self.head(self.pool(x.transpose(1, 2)).squeeze(-1))


torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    tokens = torch.randint(1, VOCABULARY, (8, TIME))
    lengths = torch.randint(2, TIME + 1, (8, 1))
    tokens = tokens.masked_fill(torch.arange(TIME) >= lengths, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(tokens).float(), tokens[:, 0])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
