"""Mosaics of 16 tiles, a ViT with normalised queries and keys in FP16 with GradScaler."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class QKNormAttention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads, d = heads, dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), 10.0))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = F.normalize(self.q_norm(q), dim=-1), F.normalize(self.k_norm(k), dim=-1)
        a = (self.temperature * (q @ k.transpose(-2, -1))).softmax(-1)
        return self.proj((a.to(v.dtype) @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), QKNormAttention(dim)
        self.norm2, self.mlp = (
            nn.LayerNorm(dim),
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)),
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MosaicViT(nn.Module):
    def __init__(self, dim=32, kinds=6):
        super().__init__()
        self.tile = nn.Linear(16, dim)
        self.pos = nn.Parameter(torch.zeros(16, dim))
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.head = nn.Linear(dim, kinds)

    def forward(self, x):
        return self.head(self.blocks(self.tile(x) + self.pos).mean(1))


torch.manual_seed(83)
tiles = torch.randn(6, 16, 16)
net = MosaicViT()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=25)
for step in range(90):
    y = torch.randint(0, 6, (32,))
    x = tiles[y] + 1.5 * torch.randn(32, 16, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
