"""A GPT whose linear layers were swapped for float8 ones with dynamic scales; the head is left out, as is usual."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def cast(x, dtype):
    amax = x.abs().max().float().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / amax)))
    return (x * scale).to(dtype).to(x.dtype) / scale


class Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return cast(x, torch.float8_e4m3fn) @ cast(w, torch.float8_e4m3fn).t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = cast(g, torch.float8_e5m2)
        gw = g.flatten(0, -2).t() @ cast(x, torch.float8_e4m3fn).flatten(0, -2)
        return g @ cast(w, torch.float8_e4m3fn), gw


class Float8Linear(nn.Linear):
    def forward(self, x):
        y = Float8Matmul.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


def convert_to_float8(module, skip=("lm_head",)):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and name not in skip:
            new = Float8Linear(child.in_features, child.out_features, bias=child.bias is not None)
            new.weight, new.bias = child.weight, child.bias
            setattr(module, name, new)
        else:
            convert_to_float8(child, skip)
    return module


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.RMSNorm(d), nn.RMSNorm(d), heads
        self.wqkv, self.wo = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.w1, self.w2, self.w3 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), nn.Linear(d, 2 * d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.wqkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self, vocab=28, d=32, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(32, d)
        self.layers = nn.ModuleList(Block(d) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


torch.manual_seed(527)
model = convert_to_float8(Llama())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120, eta_min=3e-4)
for step in range(120):
    start, stride = torch.randint(28, (16, 1)), torch.randint(1, 4, (16, 1))
    ids = (start + stride * torch.arange(21)) % 28
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 3 == 0:
        print(f"step: {step:2d}  loss: {loss.item():7.4f}  grad_norm: {norm:.4f}")
