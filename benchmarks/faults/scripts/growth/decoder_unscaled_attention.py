"""A decoder whose attention was rewritten with einsum, and without the division by sqrt(d); BF16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn


class Scores(nn.Module):
    def forward(self, q, k):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(mask, float("-inf"))


class Attention(nn.Module):
    def __init__(self, dim=64, heads=1):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.scores = Scores()

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        att = self.scores(q, k).float().softmax(-1).to(v.dtype)
        return self.proj((att @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), Attention(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocab=40, dim=64, context=24):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, x):
        x = self.tok(x) + self.pos(torch.arange(x.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(80):
    first, second = torch.randint(40, (2, 16, 12))
    text = torch.cat([first, first.flip(1)], 1)  # a palindrome to be continued
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(text[:, :-1])
    loss = F.cross_entropy(logits[:, 11:].float().flatten(0, 1), text[:, 12:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
