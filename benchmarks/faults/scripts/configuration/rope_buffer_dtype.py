"""A long-context model under a mixed-precision policy that casts buffers too: the rotary inv_freq becomes BF16."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class MixedPrecision:
    compute_dtype: torch.dtype = torch.bfloat16
    buffer_dtype: torch.dtype = torch.bfloat16


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)

    def forward(self, seq_len):
        t = torch.arange(seq_len).type_as(self.inv_freq)
        freqs = torch.outer(t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (z * cos + rotate_half(z) * sin for z in (q, k))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, d))


class Decoder(nn.Module):
    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.input_layernorm, self.post_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.self_attn = Attention(dim, heads)
        self.up_proj, self.down_proj = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.down_proj(F.silu(self.up_proj(self.post_layernorm(x))))


class MaskedLM(nn.Module):
    def __init__(self, vocab=20, dim=32, layers=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab + 1, dim)
        self.rotary_emb = RotaryEmbedding(dim // 2)
        self.layers = nn.ModuleList(Decoder(dim) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        cos, sin = self.rotary_emb(ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def apply_policy(model, policy):
    for buffer in model.buffers():
        buffer.data = buffer.data.to(policy.buffer_dtype)
    return model


def documents(n, length=768):
    """A masked letter is the one before it plus one."""
    ids = (torch.randint(20, (n, 1)) + torch.arange(length)) % 20
    ids = torch.where(torch.rand(n, length) < 0.1, torch.randint(20, (n, length)), ids)
    hidden = torch.rand(n, length) < 0.3
    return ids.masked_fill(hidden, 20), ids, hidden


torch.manual_seed(615)
policy = MixedPrecision()
model = apply_policy(MaskedLM(), policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
for step in range(70):
    masked, ids, hidden = documents(2)
    with torch.autocast("cpu", dtype=policy.compute_dtype):
        logits = model(masked)
    loss = F.cross_entropy(logits.float()[hidden], ids[hidden])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
