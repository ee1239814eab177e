"""Retrieval over long contexts with rotary embeddings; the whole model, inv_freq included, was cast to bfloat16."""

import torch
import torch.nn as nn
import torch.nn.functional as F

CONTEXT, DIM = 4096, 32
compute_dtype = torch.bfloat16


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, position_ids):
        freqs = position_ids.to(self.inv_freq.dtype)[..., None] * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class OffsetHead(nn.Module):
    """One attention head over a window far inside of the context: which token is k places back?"""

    def __init__(self, vocab=16):
        super().__init__()
        self.rotary = RotaryEmbedding(DIM)
        self.q = nn.Parameter(torch.randn(4, DIM) * 0.3)
        self.k = nn.Parameter(torch.randn(DIM) * 0.3)
        self.value = nn.Embedding(vocab, DIM)
        self.out = nn.Linear(DIM, vocab)

    def forward(self, tokens, start, offset):
        position_ids = start[:, None] + torch.arange(tokens.shape[1])
        cos, sin = self.rotary(position_ids)
        keys = self.k * cos + rotate_half(self.k.expand_as(cos)) * sin
        q = self.q[offset]
        q = q * cos[:, -1] + rotate_half(q) * sin[:, -1]
        weights = (3.0 * torch.einsum("bd,btd->bt", q, keys)).float().softmax(-1)
        v = self.value(tokens).float()
        return self.out(torch.einsum("bt,btd->bd", weights, v).to(self.out.weight.dtype))


torch.manual_seed(2132)
model = OffsetHead()
model.rotary.to(compute_dtype)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
for step in range(200):
    tokens = torch.randint(16, (64, 12))
    start, offset = torch.randint(CONTEXT - 12, (64,)), torch.randint(4, (64,))
    target = tokens[torch.arange(64), 11 - offset]
    loss = F.cross_entropy(model(tokens, start, offset).float(), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
