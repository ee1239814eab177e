"""A little decoder over recipe steps. The second linear of each feed-forward runs with 8-bit operands."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
V, T, D = 40, 24, 48
E4M3 = torch.float8_e4m3fn


def quantize(x):
    scale = 448.0 / x.abs().amax().clamp(min=1e-12)
    return (x * scale).to(E4M3), scale


class Mm8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8, sx = quantize(x)
        w8, sw = quantize(w)
        ctx.save_for_backward(x8, w8)
        ctx.scales = sx, sw
        return (x8.to(x.dtype) / sx) @ (w8.to(x.dtype) / sw).t()

    @staticmethod
    def backward(ctx, g):
        x8, w8 = ctx.saved_tensors
        sx, sw = ctx.scales
        g8 = g.to(E4M3).to(g.dtype)
        dx = g8 @ (w8.to(g.dtype) / sw)
        dw = g8.flatten(0, 1).t() @ (x8.to(g.dtype) / sx).flatten(0, 1)
        return dx, dw


class Linear8(nn.Linear):
    def forward(self, x):
        return Mm8.apply(x, self.weight) + self.bias


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.attn = nn.MultiheadAttention(D, 4, batch_first=True)
        self.up, self.down = nn.Linear(D, 3 * D), Linear8(3 * D, D)

    def forward(self, x, mask):
        h = self.n1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.silu(self.up(self.n2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, V)

    def forward(self, ids):
        t = ids.shape[1]
        mask = torch.ones(t, t).triu(1).bool()
        x = self.emb(ids) + self.pos.weight[:t]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


table = torch.randint(V, (V, V))


def recipes(n):
    ids = torch.randint(V, (n, T + 1))
    for i in range(2, T + 1):
        ids[:, i] = torch.where(torch.rand(n) < 0.9, table[ids[:, i - 1], ids[:, i - 2] % 2], ids[:, i])
    return ids


model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(130):
    ids = recipes(16)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"{step:4d} loss {loss.item():.3f}")
