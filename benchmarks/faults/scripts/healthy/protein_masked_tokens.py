"""Masked residues with padding: additive masks of -1e4 under FP16 autocast, a loss on 15 % of the places."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(20)
AA, LEN, D = 20, 16, 32
MASK, PAD = 20, 21


def chains(n):
    base = torch.randint(AA, (n, 1))
    x = (base + 3 * torch.arange(LEN)) % AA
    length = torch.randint(8, LEN + 1, (n, 1))
    pad = torch.arange(LEN) >= length
    hidden = (torch.rand(n, LEN) < 0.15) & ~pad
    hidden[:, 0] = True
    return x.masked_fill(hidden, MASK).masked_fill(pad, PAD), x.masked_fill(~hidden, -100), pad


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))
        self.norm = nn.LayerNorm(D)

    def forward(self, x, bias):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, D // 4)).permute(2, 0, 3, 1, 4)
        w = (q @ k.transpose(-1, -2) / (D // 4) ** 0.5 + bias).softmax(-1)
        x = x + self.proj((w.to(v.dtype) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class ProteinLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(22, D, padding_idx=PAD), nn.Parameter(0.1 * torch.randn(LEN, D))
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(D, AA)

    def forward(self, ids, pad):
        bias = torch.zeros(len(ids), 1, 1, LEN).masked_fill(pad[:, None, None], -1e4)
        x = self.tok(ids) + self.pos
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x)


model = ProteinLM()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step in range(120):
    ids, labels, pad = chains(24)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids, pad)
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
