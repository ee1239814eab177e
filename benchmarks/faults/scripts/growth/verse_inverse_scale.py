"""Does a verse rhyme with the one before? Attention over syllables, written out by hand (heads of 64)."""

import torch
import torch.nn.functional as F
from torch import nn

HEAD = 64


class HandAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, heads * HEAD, bias=False)
        self.k = nn.Linear(width, heads * HEAD, bias=False)
        self.v = nn.Linear(width, heads * HEAD, bias=False)
        self.o = nn.Linear(heads * HEAD, width)
        self.scale = HEAD**0.5

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, self.heads, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = self.scale * (q @ k.transpose(-1, -2))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class RhymeNet(nn.Module):
    def __init__(self, syllables=20, width=64, length=16):
        super().__init__()
        self.embed = nn.Embedding(syllables, width)
        self.place = nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attentions = nn.ModuleList(HandAttention(width, 2) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width)) for _ in range(2)
        )
        self.verdict = nn.Linear(width, 20)

    def forward(self, verse):
        x = self.embed(verse) + self.place(torch.arange(verse.shape[1]))
        for i in range(2):
            x = x + self.attentions[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return self.verdict(x)


def verses(n):
    """The second half repeats the first with every sound replaced by its rhyme."""
    first = torch.randint(20, (n, 8))
    return torch.cat([first, torch.zeros(n, 8, dtype=torch.long)], 1), (first + 3) % 20


torch.manual_seed(40)
model = RhymeNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(70):
    verse, rhyme = verses(32)
    loss = F.cross_entropy(model(verse)[:, 8:].flatten(0, 1), rhyme.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step + 1:3d} loss {loss.item():.4f}")
