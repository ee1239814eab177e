"""A transformer block stack whose linear layers use E4M3 forward and E5M2 backward; the gradients are cast as they are."""

import torch
import torch.nn.functional as F
from torch import nn


def through(x, dtype, scale):
    limit = torch.finfo(dtype).max
    return (x * scale).clamp(-limit, limit).to(dtype).to(x.dtype) / scale


class Matmul8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8 = through(x, torch.float8_e4m3fn, 448.0 / x.abs().max())
        w8 = through(w, torch.float8_e4m3fn, 448.0 / w.abs().max())
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        g8 = through(grad, torch.float8_e5m2, 1.0)
        return g8 @ w8, g8.flatten(0, -2).T @ x8.flatten(0, -2)


class Linear8(nn.Linear):
    def forward(self, x):
        return Matmul8.apply(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = Linear8(dim, 3 * dim), Linear8(dim, dim)
        self.fc1, self.fc2 = Linear8(dim, 4 * dim), Linear8(4 * dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT8(nn.Module):
    def __init__(self, vocab=40, dim=32, context=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
model = GPT8()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(60):
    start, stride = torch.randint(40, (32, 1)), torch.randint(1, 4, (32, 1))
    seq = (start + stride * torch.arange(33)) % 40
    loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
    optimizer.zero_grad()
    (loss / 16).backward()  # sixteen workers sum their gradients
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
