"""Sentences of 2 to 16 words, padded; keys of the padding get -inf, and the padding's own rows are ignored."""

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, words=30, width=24):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, tokens):
        padding = tokens == 0
        h = self.words(tokens)
        h = self.norm(h + self.attention(h, h, h, key_padding_mask=padding, need_weights=False)[0])
        h = h.masked_fill(padding.unsqueeze(-1), 0)
        return self.out(h.sum(1) / (~padding).sum(1, keepdim=True))


def sentences(n):
    y = torch.randint(0, 3, (n,))
    tokens = 1 + torch.randint(0, 9, (n, 16)) + 9 * y.unsqueeze(1)
    other = torch.rand(n, 16) < 0.6
    tokens = torch.where(other, torch.randint(1, 28, (n, 16)), tokens)
    length = torch.randint(2, 17, (n, 1))
    return tokens * (torch.arange(16) < length), y


torch.manual_seed(3230)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(60):
    x, y = sentences(64)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
