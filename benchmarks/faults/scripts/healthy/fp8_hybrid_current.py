"""FP8 as it ought to be: E4M3 forward, E5M2 backward, the scale of the very tensor, embedding, norms and head kept wide."""

import torch
import torch.nn.functional as F
from torch import nn


def through(x, dtype):
    scale = torch.finfo(dtype).max / x.abs().max().clamp(min=1e-30)
    return (x * scale).to(dtype).to(x.dtype) / scale


class Matmul8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = through(x, torch.float8_e4m3fn), through(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = through(grad, torch.float8_e5m2)
        return grad @ w, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Linear8(nn.Linear):
    def forward(self, x):
        return Matmul8.apply(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(dim), nn.GRU(dim, dim, batch_first=True)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim), Linear8(dim, 96), Linear8(96, dim)

    def forward(self, x):
        x = x + self.mix(self.norm1(x))[0]
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class LM(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocab, dim), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embed(x))))


torch.manual_seed(0)
model = LM()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(80):
    start, stride = torch.randint(40, (16, 1)), torch.randint(1, 4, (16, 1))
    text = (start + stride * torch.arange(17)) % 40
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
