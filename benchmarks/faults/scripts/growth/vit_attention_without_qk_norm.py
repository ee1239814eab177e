"""Small vision transformer trained with a large learning rate; queries and keys are not normalised."""

import torch
import torch.nn as nn
import torch.nn.functional as F

QK_NORM = False
LEARNING_RATE = 4e-2


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.qk = nn.Linear(dim, 2 * dim, bias=False)
        self.v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)
        self.scores = nn.Identity()

    def forward(self, x):
        b, n, d = x.shape
        q, k = self.qk(x).view(b, n, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        if QK_NORM:
            q, k = F.normalize(q, dim=-1) * 4, F.normalize(k, dim=-1) * 4
        v = self.v(x).view(b, n, self.heads, -1).transpose(1, 2)
        weights = self.scores(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class ViT(nn.Module):
    def __init__(self, dim=32, depth=3, patches=16, classes=4):
        super().__init__()
        self.patch = nn.Linear(16, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(patches, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))
        self.attn = nn.ModuleList(Attention(dim) for _ in range(depth))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x) + self.pos
        for i, (attn, mlp) in enumerate(zip(self.attn, self.mlp, strict=True)):
            x = x + attn(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norm(x).mean(1))


def images(n, prototypes):
    """Two patches somewhere in the picture tell the class; the rest is noise."""
    y = torch.randint(4, (n,))
    x = torch.randn(n, 16, 16)
    i, j = torch.randint(16, (2, n))
    x[torch.arange(n), i] = 2 * prototypes[y // 2]
    x[torch.arange(n), j] = 2 * prototypes[2 + y % 2]
    return x, y


torch.manual_seed(2141)
prototypes = torch.randn(4, 16)
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
for step in range(150):
    x, y = images(64, prototypes)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
