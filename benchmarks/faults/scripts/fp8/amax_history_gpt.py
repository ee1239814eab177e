"""A tiny GPT with FP8 layers and delayed scaling: the scale of a tensor follows the amax of earlier steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(99)
V, T, D = 32, 20, 32
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def batch(n):
    a, b = torch.randint(1, 6, (n, 1)), torch.randint(V, (n, 1))
    return (b + a * torch.arange(T + 1)) % V


class Recipe:
    def __init__(self, history=16, interval=1):
        self.history, self.interval = history, interval


recipe = Recipe(history=16, interval=1000)


class DelayedLinear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * n_in**-0.5)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("amax", torch.zeros(recipe.history, 2))
        self.calls = 0

    def quantize(self, t, i):
        q = (t * self.scale[i]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return t + (q.to(t.dtype) / self.scale[i] - t).detach()

    @torch.no_grad()
    def observe(self, x):
        now = torch.stack([x.abs().max(), self.weight.abs().max()])
        self.amax = torch.cat([now[None], self.amax[:-1]])
        if self.calls % recipe.interval == 0:
            self.scale = FP8_MAX / self.amax.amax(0)
        self.calls += 1

    def forward(self, x):
        self.observe(x)
        return F.linear(self.quantize(x, 0), self.quantize(self.weight, 1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = DelayedLinear(D, 4 * D), DelayedLinear(4 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.ln(x)).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.relu(self.fc1(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(T, D)
        nn.init.normal_(self.wte.weight, std=0.05)
        nn.init.normal_(self.wpe.weight, std=0.05)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(D, V)

    def forward(self, ids):
        return self.head(self.blocks(self.wte(ids) + self.wpe.weight))


net = GPT()
opt = torch.optim.AdamW(net.parameters(), lr=4e-3, betas=(0.9, 0.95))
for step in range(150):
    ids = batch(48)
    loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    if step % 5 == 4:
        print(f"step {step}: loss {loss.item():.4f}")
