"""Causal linear attention over bytes: running sums of key-value products; FP16 autocast, scaler, accumulation."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class LinearAttention(nn.Module):
    """Katharopoulos et al., with a squared ReLU as feature map."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1) for f in (self.q, self.k, self.v))
        q, k = F.relu(q) + 0.01, F.relu(k) + 0.01
        kv = k.unsqueeze(-1) * v.unsqueeze(-2)
        state = torch.cumsum(kv, dim=1)
        norm = k.cumsum(1)
        top = torch.einsum("bthi,bthij->bthj", q, state)
        bottom = (q * norm).sum(-1, keepdim=True)
        return self.o((top / bottom).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = LinearAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class ByteLM(nn.Module):
    def __init__(self, vocab=64, dim=32, heads=2, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.ln = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.tok(ids)
        for blk in self.blocks:
            x = blk(x)
        return self.out(self.ln(x))


def documents(batch, length, slowest=1):
    start = torch.randint(64, (batch, 1))
    stride = torch.randint(slowest, 4, (batch, 1))
    return (start + stride * torch.arange(length + 1)) % 64


torch.manual_seed(23)
model = ByteLM()
with torch.no_grad():  # sharp attention from the start
    model.blocks[1].attn.k.weight.mul_(9)
    model.blocks[1].attn.v.weight.mul_(9)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
accum = 2
for it in range(40):
    # long documents come last; some are one byte over and over
    ids = documents(4, 64) if it < 24 else documents(4, 512, slowest=0)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    scaler.scale(loss / accum).backward()
    if it % accum == accum - 1:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    if it % 8 == 0:
        print(f"it {it} bits {loss.item() / math.log(2):.3f}")
