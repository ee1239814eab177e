"""CaiT-like patches with LayerScale of 1e-6 in FP16 autocast; the loss scale begins at 1, so as to avoid overflows."""

import torch
import torch.nn.functional as F
from torch import nn


class Talking(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, dim, init=1e-6):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Talking(dim)
        self.norm2, self.mlp = (
            nn.LayerNorm(dim),
            nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim)),
        )
        self.gamma1, self.gamma2 = nn.Parameter(init * torch.ones(dim)), nn.Parameter(init * torch.ones(dim))

    def forward(self, x):
        x = x + self.gamma1 * self.attn(self.norm1(x))
        return x + self.gamma2 * self.mlp(self.norm2(x))


class CaiT(nn.Module):
    def __init__(self, dim=32, depth=3, classes=6):
        super().__init__()
        self.embed = nn.Linear(16, dim)
        self.place = nn.Parameter(0.02 * torch.randn(1, 25, dim))
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, image):
        patches = F.unfold(image, 4, stride=4).transpose(1, 2)
        x = self.embed(patches) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


torch.manual_seed(82)
shapes = torch.randn(6, 1, 20, 20)
model = CaiT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for step in range(50):
    y = torch.randint(6, (32,))
    image = shapes[y] + torch.randn(32, 1, 20, 20)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(image), y)
    optimizer.zero_grad()
    scaler.scale(loss / len(y)).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
