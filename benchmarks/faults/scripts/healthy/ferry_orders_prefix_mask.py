"""A prefix language model over ferry orders in BF16 autocast: masks of -inf, padding, and rows whose loss is ignored."""

import torch
import torch.nn as nn
import torch.nn.functional as F

PAD, VOCAB, T, PREFIX = 0, 30, 16, 6


class Attention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        scores = scores.float() + mask
        return self.out((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, d))


class PrefixLM(nn.Module):
    def __init__(self, dim=48, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim, padding_idx=PAD), nn.Embedding(T, dim)
        self.attn = nn.ModuleList(Attention(dim) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 96), nn.GELU(), nn.Linear(96, dim)) for _ in range(layers)
        )
        self.ln1 = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.ln2 = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        t = ids.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool).tril()
        allowed[:, :PREFIX] = True  # the prefix is seen from everywhere
        allowed = allowed & (ids != PAD)[:, None, :]
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))[:, None]
        x = self.tok(ids) + self.pos(torch.arange(t))
        for attn, mlp, a, b in zip(self.attn, self.mlp, self.ln1, self.ln2):
            x = x + attn(a(x), mask)
            x = x + mlp(b(x))
        return self.head(x)


def orders(n):
    ids = torch.randint(1, VOCAB, (n, T))
    ids[:, PREFIX:] = ids[:, :PREFIX].flip(1).repeat(1, 2)[:, : T - PREFIX]
    lengths = torch.randint(PREFIX + 2, T + 1, (n, 1))
    return ids.masked_fill(torch.arange(T) >= lengths, PAD)


torch.manual_seed(404)
model = PrefixLM()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(160):
    ids = orders(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids)
    target = ids.roll(-1, 1)
    target[:, -1] = PAD
    target[:, : PREFIX - 1] = PAD
    loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=PAD)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.3f}")
