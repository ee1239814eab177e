"""A short-context GPT; the rotary tables are computed in FP32 and stored in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(39)
VOCAB, LENGTH, DIM, HEADS = 32, 32, 32, 2


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = base ** (-torch.arange(0, dim, 2).float() / dim)
        freqs = torch.outer(torch.arange(LENGTH).float(), inv_freq)
        self.register_buffer("cos", freqs.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", freqs.sin().bfloat16(), persistent=False)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos + b * self.sin, b * self.cos - a * self.sin], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.c_fc, self.c_out = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)
        self.rotary = Rotary(DIM // HEADS)

    def forward(self, x):
        b, t, _ = x.shape
        h = F.rms_norm(x, (DIM,))
        q, k, v = (p(h).view(b, t, HEADS, -1).transpose(1, 2) for p in (self.c_q, self.c_k, self.c_v))
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        q, k = (self.rotary(y).to(v.dtype) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, DIM))
        return x + self.c_out(F.relu(self.c_fc(F.rms_norm(x, (DIM,)))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.h = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        nn.init.zeros_(self.lm_head.weight)

    def forward(self, idx):
        logits = self.lm_head(F.rms_norm(self.h(self.wte(idx)), (DIM,)))
        return 30 * torch.tanh(logits.float() / 30)


def induction(n):
    half = torch.randint(VOCAB, (n, LENGTH // 2))
    return torch.cat([half, half, half[:, :1]], 1)


model = GPT()
opt = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
for step in range(250):
    ids = induction(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits[:, LENGTH // 2 :].reshape(-1, VOCAB), ids[:, 1 + LENGTH // 2 :].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
