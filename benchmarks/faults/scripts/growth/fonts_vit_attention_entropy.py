"""A ViT on glyphs, no qk-norm and no warm-up, with the rate of the ResNet recipe: attention turns one-hot."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(79)
QK_NORM = False
DIM, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm, self.k_norm = (nn.LayerNorm(DIM // HEADS) if QK_NORM else nn.Identity() for _ in range(2))
        self.attn_drop = nn.Identity()

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = self.q_norm(q) @ self.k_norm(k).transpose(-2, -1) / (DIM // HEADS) ** 0.5
        attn = self.attn_drop(scores).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.patch_embed = nn.Linear(16, DIM)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 16, DIM))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, classes)

    def forward(self, patches):
        return self.head(self.norm(self.blocks(self.patch_embed(patches) + self.pos_embed)).mean(1))


glyphs = torch.randn(8, 16, 16)


def batch(n):
    y = torch.randint(8, (n,))
    x = glyphs[y] + 1.5 * torch.randn(n, 16, 16)
    return torch.stack([g.roll(int(k), 0) for g, k in zip(x, torch.randint(4, (n,)))]), y


model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1, weight_decay=0.0)
for step in range(160):
    x, y = batch(48)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        print(f"step {step + 1} loss {loss.item():.4f}")
