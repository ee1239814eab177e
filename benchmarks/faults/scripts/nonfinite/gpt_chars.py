"""Character-level GPT on a toy corpus, FP16 autocast with a loss scaler."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = "the quick brown fox jumps over the lazy dog while the five boxing wizards jump quickly. " * 20
CHARS = sorted(set(TEXT))
DATA = torch.tensor([CHARS.index(c) for c in TEXT])


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).bool())

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = q @ k.transpose(-2, -1)
        att = att / math.sqrt(k.size(-1))
        att = att.masked_fill(~self.bias[:T, :T], float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, block_size)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab, n_layer=2, n_head=2, n_embd=32, block_size=24):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, block_size) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


def get_batch(batch_size, block_size):
    ix = torch.randint(len(DATA) - block_size - 1, (batch_size,))
    x = torch.stack([DATA[i : i + block_size] for i in ix])
    y = torch.stack([DATA[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


torch.manual_seed(1337)
model = GPT(len(CHARS))
with torch.no_grad():
    model.h[1].attn.c_attn.weight.mul_(60.0)  # "sharper heads train faster"
optimizer = torch.optim.AdamW(
    [
        {"params": [p for n, p in model.named_parameters() if "c_attn" in n], "lr": 2.0},
        {"params": [p for n, p in model.named_parameters() if "c_attn" not in n], "lr": 3e-3},
    ],
    weight_decay=0.0,
)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for it in range(12):
    xb, yb = get_batch(8, 24)
    with torch.autocast("cpu", dtype=torch.float16):
        _, loss = model(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"iter {it}: loss {loss.item():.4f}")
