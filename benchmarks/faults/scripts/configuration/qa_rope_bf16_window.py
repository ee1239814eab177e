"""Find the word k places back in a long window: rotary attention, window taken from the end of a document."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(63)
DIM, HEADS, WORDS, DOC = 64, 2, 16, 6000


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2) / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, position_ids):
        freqs = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class LongAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.v_proj, self.o_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.rotary_emb = RotaryEmbedding(DIM // HEADS)

    def forward(self, x, position_ids):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = (z[:, None] for z in self.rotary_emb(q, position_ids))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, DIM))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, DIM), nn.LayerNorm(DIM)
        self.attn, self.head = LongAttention(), nn.Linear(DIM, WORDS)

    def forward(self, ids, position_ids):
        x = self.embed(ids)
        return self.head(x + self.attn(self.norm(x), position_ids))


model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(300):
    ids = torch.randint(WORDS, (16, 40))
    position_ids = torch.randint(2000, DOC, (16, 1)) + torch.arange(40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids, position_ids)
    loss = F.cross_entropy(logits[:, 2:].float().flatten(0, 1), ids[:, :-2].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print(f"step {step + 1} loss {loss.item():.4f}")
