"""A transformer over pixels with a bold learning rate, no warm-up and no QK norm: attention logits grow, entropy collapses."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Attention(nn.Module):
    def __init__(self, dim, num_heads=2, qk_norm=False):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(self.head_dim, elementwise_affine=False) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, elementwise_affine=False) if qk_norm else nn.Identity()

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        attn = (q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, dim, qk_norm):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, qk_norm=qk_norm)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PixelTransformer(nn.Module):
    def __init__(self, size=8, levels=8, dim=32, depth=3, qk_norm=False):
        super().__init__()
        self.tokens, self.pos = nn.Embedding(levels, dim), nn.Parameter(0.02 * torch.randn(size * size, dim))
        self.blocks = nn.ModuleList(Block(dim, qk_norm) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 4)

    def forward(self, pixels):
        x = self.tokens(pixels.flatten(1)) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Gradients(Dataset):
    """Which corner is the bright one?"""

    def __init__(self, n):
        self.label = torch.randint(4, (n,))
        y, x = torch.meshgrid(torch.linspace(0, 1, 8), torch.linspace(0, 1, 8), indexing="ij")
        ramp = torch.stack([x + y, x + 1 - y, 1 - x + y, 2 - x - y])[self.label] / 2
        self.pixels = (8 * (0.75 * ramp + 0.25 * torch.rand(n, 8, 8) * 2 - 0.1)).clamp(0, 7).long()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.pixels[i], self.label[i]


def main():
    torch.manual_seed(616)
    loader = DataLoader(Gradients(1920), batch_size=16, shuffle=True)
    model = PixelTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step, (pixels, label) in enumerate(loader):
        loss = F.cross_entropy(model(pixels), label)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 4 == 0:
            print(f"step={step} loss={loss.item():.4f} grad_norm={grad_norm:.3f}")


if __name__ == "__main__":
    main()
