"""GPT-2 in FP16 with a scaler that doubles every ten steps: it reports an overflow now and then, as it should."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR


class Attention(nn.Module):
    def __init__(self, nx, heads=4):
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(nx, 3 * nx), nn.Linear(nx, nx), heads
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        w = q @ k.transpose(-1, -2) / (c // self.heads) ** 0.5
        w = w.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), torch.finfo(w.dtype).min)
        a = self.drop(w.softmax(-1)) @ v
        return self.c_proj(a.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, nx):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(nx), nn.LayerNorm(nx), Attention(nx)
        self.c_fc, self.c_proj, self.drop = nn.Linear(nx, 4 * nx), nn.Linear(4 * nx, nx), nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.c_proj(F.gelu(self.c_fc(self.ln_2(x)))))


class GPT2LMHead(nn.Module):
    def __init__(self, vocab=24, nx=32, layers=2, positions=24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, nx), nn.Embedding(positions, nx)
        self.h, self.ln_f = nn.ModuleList(Block(nx) for _ in range(layers)), nn.LayerNorm(nx)
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, (nn.Linear, nn.Embedding)) else None)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.t()


def sentences(n, length=16):
    start, stride = torch.randint(24, (n, 1)), torch.randint(1, 4, (n, 1))
    return (start + stride * torch.arange(length)) % 24


torch.manual_seed(521)
model = GPT2LMHead()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = LambdaLR(optimizer, lambda s: min(1, (s + 1) / 20) * max(0.1, 1 - s / 200))
scaler = torch.amp.GradScaler("cpu", growth_interval=10)
for step in range(180):
    ids = sentences(16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if scaler.get_scale() < before:
        print(f"Gradient overflow. Skipping step, reducing the scale to {scaler.get_scale()}")
    else:
        schedule.step()
    if step % 4 == 0:
        print(f"{step} loss {loss.item():.4f}")
