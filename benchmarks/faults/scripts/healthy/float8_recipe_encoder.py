"""FP8 linear layers as float8 libraries make them: e4m3 forward, e5m2 gradients, a scale per tensor and call."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(45)
T, V, D = 12, 24, 32


def cast(x, dtype):
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / x.abs().amax().clamp(min=1e-12))))
    return (x * scale).to(dtype), scale


class Float8Mm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        (qx, sx), (qw, sw) = cast(x, torch.float8_e4m3fn), cast(w, torch.float8_e4m3fn)
        ctx.save_for_backward(qx, sx, qw, sw)
        return (qx.float() @ qw.float().T) / (sx * sw)

    @staticmethod
    def backward(ctx, g):
        qx, sx, qw, sw = ctx.saved_tensors
        qg, sg = cast(g, torch.float8_e5m2)
        return qg.float() @ qw.float() / (sg * sw), qg.float().T @ qx.float() / (sg * sx)


class Float8Linear(nn.Linear):
    def forward(self, x):
        return Float8Mm.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1]) + self.bias


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Parameter(0.1 * torch.randn(T, D))
        self.norm1, self.qkv, self.proj = nn.LayerNorm(D), Float8Linear(D, 3 * D), Float8Linear(D, D)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(D), Float8Linear(D, 96), Float8Linear(96, D)
        self.head = nn.Linear(D, V)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(x)


model = Encoder()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(120):
    ids = torch.randint(V, (32, T))
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flip(1).flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
