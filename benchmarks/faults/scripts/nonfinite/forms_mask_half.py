"""Fields of scanned forms, tagged by a transformer that also sees their boxes; all of it in FP16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn


class BoxEmbedding(nn.Module):
    def __init__(self, dim, grid=32):
        super().__init__()
        self.x, self.y = nn.Embedding(grid, dim), nn.Embedding(grid, dim)

    def forward(self, boxes):
        return self.x(boxes[..., 0]) + self.y(boxes[..., 1])


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.in_proj, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("very_low", torch.tensor(torch.finfo(torch.float32).min), persistent=False)

    def forward(self, x, attend):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.in_proj(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5
        bias = self.very_low.to(scores.dtype)
        scores = scores + (~attend).to(scores.dtype)[:, None, None] * bias
        return self.out((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, d))


class Encoder(nn.Module):
    def __init__(self, dim, heads, depth):
        super().__init__()
        self.attn = nn.ModuleList(SelfAttention(dim, heads) for _ in range(depth))
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(depth))

    def forward(self, x, attend):
        for attn, norm, ff in zip(self.attn, self.norm, self.ff):
            x = x + attn(norm(x), attend)
            x = x + ff(x)
        return x


class FormTagger(nn.Module):
    def __init__(self, vocab=80, dim=32, tags=5):
        super().__init__()
        self.word = nn.Embedding(vocab, dim, padding_idx=0)
        self.box = BoxEmbedding(dim)
        self.encoder = Encoder(dim, 4, 2)
        self.tag = nn.Linear(dim, tags)

    def forward(self, words, boxes):
        return self.tag(self.encoder(self.word(words) + self.box(boxes), words != 0))


def forms(n, length=14):
    words = torch.randint(1, 80, (n, length))
    boxes = torch.randint(0, 32, (n, length, 2))
    tags = (words + boxes[..., 0] // 8) % 5
    for i in range(n):
        words[i, torch.randint(8, length + 1, ()) :] = 0
    return words, boxes, tags.masked_fill(words == 0, -100)


torch.manual_seed(46)
model = FormTagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(25):
    words, boxes, tags = forms(8)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(words, boxes)
    loss = F.cross_entropy(logits.float().transpose(1, 2), tags)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
