"""A small GPT in the style of nanoGPT: bfloat16, accumulation, -inf above the diagonal, and samples in between."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

text = "to be or not to be that is the question whether tis nobler in the mind to suffer the slings and arrows " * 12
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
train_data, val_data = data[:-200], data[-200:]

# config
block_size, batch_size, gradient_accumulation_steps = 24, 8, 2
n_embd, n_head, n_layer, dropout = 32, 4, 2, 0.1
learning_rate, min_lr, warmup_iters, max_iters, eval_interval = 3e-3, 3e-4, 5, 40, 10


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (y.view(B, T, n_head, C // n_head).transpose(1, 2) for y in self.c_attn(x).split(n_embd, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(n_embd), CausalSelfAttention(), nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(len(chars), n_embd),
                wpe=nn.Embedding(block_size, n_embd),
                h=nn.ModuleList([Block() for _ in range(n_layer)]),
                ln_f=nn.LayerNorm(n_embd),
            )
        )
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=0.8, top_k=5):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -block_size:])
            logits = logits[:, -1, :].float() / temperature
            v, _ = torch.topk(logits, top_k)
            logits[logits < v[:, [-1]]] = -float("Inf")
            probs = F.softmax(logits, dim=-1)
            idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
        return idx


def get_batch(source):
    ix = torch.randint(len(source) - block_size - 1, (batch_size,))
    return torch.stack([source[i : i + block_size] for i in ix]), torch.stack(
        [source[i + 1 : i + 1 + block_size] for i in ix]
    )


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    return min_lr + 0.5 * (1 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters))) * (
        learning_rate - min_lr
    )


torch.manual_seed(1337)
model = GPT()
ctx = torch.autocast(device_type="cpu", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
best_val_loss = float("inf")

for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        model.eval()
        with torch.no_grad(), ctx:
            val = torch.stack([model(*get_batch(val_data))[1] for _ in range(4)]).mean().item()
            out = model.generate(torch.zeros((1, 1), dtype=torch.long), 12)
        best_val_loss = min(best_val_loss, val)
        print(f"step {iter_num}: val loss {val:.4f}", "".join(chars[i] for i in out[0].tolist()))
        model.train()
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch(train_data)
        with ctx:
            logits, loss = model(X, Y)
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print("best", best_val_loss, "last", loss.item())
