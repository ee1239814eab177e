"""A recall task over 1500 positions with rotary embeddings, after model.to(torch.bfloat16)."""

import torch
import torch.nn.functional as F
from torch import nn


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, positions):
        t = positions.to(self.inv_freq.dtype)
        freqs = t[:, None] * self.inv_freq[None]
        return torch.cat([freqs, freqs], -1).cos(), torch.cat([freqs, freqs], -1).sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.rotary = Rotary(dim // heads)

    def forward(self, x, positions):
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        cos, sin = self.rotary(positions)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.proj(y.transpose(1, 2).reshape(B, N, C))


class Recall(nn.Module):
    """Which symbol stood SHIFT places before?"""

    def __init__(self, vocab=12, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, positions):
        x = self.embed(ids)
        x = x + self.attn(self.norm1(x), positions)
        return self.head(x + self.mlp(self.norm2(x)))


torch.manual_seed(61)
SHIFT, LENGTH, VOCAB = 2, 48, 12
model = Recall().to(torch.bfloat16)
master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(master, lr=4e-3)
for step in range(150):
    start = int(torch.randint(1500, (1,)))
    positions = torch.arange(start, start + LENGTH)
    ids = torch.randint(VOCAB, (16, LENGTH))
    logits = model(ids, positions).float()
    loss = F.cross_entropy(logits[:, SHIFT:].transpose(1, 2), ids[:, :-SHIFT])
    loss.backward()
    for m, p in zip(master, model.parameters()):
        m.grad, p.grad = p.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters()):
            p.copy_(m)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
