"""Adapts a frozen transformer encoder to bird calls with low-rank pairs; the two factors have rates of their own."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(31)
D, T, K = 48, 24, 6
patterns = torch.randn(K, T, 20)


def calls(n):
    y = torch.randint(K, (n,))
    x = patterns[y] * (0.5 + torch.rand(n, 1, 1)) + 1.2 * torch.randn(n, T, 20)
    return x, y


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scaling * self.up(self.down(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.n2(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(20, D)
        self.pos = nn.Parameter(0.1 * torch.randn(T, D))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, K)

    def forward(self, x):
        x = self.embed(x) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


model = Encoder().requires_grad_(False)
for block in model.blocks:
    block.qkv = LoRALinear(block.qkv)
    block.mlp[0] = LoRALinear(block.mlp[0])
model.head.requires_grad_(True)

named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(
    [
        {"params": [p for n, p in named if "down" in n], "lr": 1e-3},
        {"params": [p for n, p in named if "up" in n], "lr": 1.6},
        {"params": [p for n, p in named if "head" in n], "lr": 3e-3},
    ],
    weight_decay=0.0,
)
for step in range(100):
    x, y = calls(32)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step:3d} loss {loss.item():.4f}")
