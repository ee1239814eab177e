"""A long-context decoder with rotary embeddings; positions and angles are computed in BF16 like everything else."""

import torch
import torch.nn.functional as F
from torch import nn


class Rotary(nn.Module):
    def __init__(self, dim, dtype=torch.bfloat16):
        super().__init__()
        self.register_buffer("inv_freq", (1e4 ** (-torch.arange(0, dim, 2) / dim)).to(dtype))

    def forward(self, length):
        t = torch.arange(length, dtype=self.inv_freq.dtype)
        angles = torch.outer(t, self.inv_freq)
        return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, cos, sin):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(a.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, vocab=24, dim=32, heads=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rotary = Rotary(dim // heads)
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        cos, sin = self.rotary(x.size(1))
        x = self.embed(x)
        x = x + self.attn(self.norm1(x), cos, sin)
        return self.head(x + self.mlp(self.norm2(x)))


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(30):
    text = torch.randint(24, (2, 1025))
    text[:, 1:] = torch.where(torch.rand(2, 1024) < 0.9, (text[:, :1] + 5 * torch.arange(1, 1025)) % 24, text[:, 1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(text[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
