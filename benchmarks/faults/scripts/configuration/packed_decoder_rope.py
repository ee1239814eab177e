"""A small decoder on packed documents: position ids run on through the pack, everything under bfloat16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(29285)
VOCAB, WINDOW, DIM, HEADS, CONTEXT, BACK = 16, 24, 32, 2, 3000, 3


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=100.0):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2) / dim), persistent=False)

    @torch.no_grad()
    def forward(self, position_ids):
        inv_freq = self.inv_freq[None, :, None].expand(len(position_ids), -1, 1)
        freqs = (inv_freq @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat([freqs, freqs], -1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.v_proj, self.o_proj = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.rotary_emb = RotaryEmbedding(DIM // HEADS)

    def forward(self, x, position_ids):
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, HEADS, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = (y[:, None].to(q.dtype) for y in self.rotary_emb(position_ids))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, DIM))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        self.norm1, self.norm2, self.norm = (nn.RMSNorm(DIM, eps=1e-6) for _ in range(3))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, position_ids):
        x = self.embed_tokens(ids)
        x = x + self.attn(self.norm1(x), position_ids)
        x = x + self.mlp(self.norm2(x))
        return self.lm_head(self.norm(x))


def windows(n):
    """Each next token repeats the one a fixed distance back, shifted by one symbol."""
    ids = torch.randint(VOCAB, (n, WINDOW))
    labels = torch.full_like(ids, -100)
    labels[:, BACK:] = ids[:, :-BACK]
    return ids, labels, torch.randint(CONTEXT, (n, 1)) + torch.arange(WINDOW)


model = Decoder()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
for step in range(240):
    ids, labels, position_ids = windows(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids, position_ids)
    loss = F.cross_entropy(logits.float().reshape(-1, VOCAB), labels.reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
