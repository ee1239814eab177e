"""A character model with warm restarts: the restart multiplies the rate by 50 instead of setting it back to 3e-3."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 96), nn.GELU(), nn.Linear(96, dim))

    def forward(self, x, mask):
        h = self.norm(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class CharLM(nn.Module):
    def __init__(self, vocab=30, dim=32, context=16):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        mask = torch.ones(x.size(1), x.size(1)).triu(1).bool()
        x = self.embed(x) + self.pos(torch.arange(x.size(1)))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


torch.manual_seed(0)
model = CharLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 50.0 if 60 <= t < 64 else 0.98 ** (t % 60))
for step in range(90):
    start, stride = torch.randint(30, (16, 1)), torch.randint(1, 4, (16, 1))
    text = (start + stride * torch.arange(17)) % 30
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
