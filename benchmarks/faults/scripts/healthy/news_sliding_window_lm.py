"""Language model with a sliding window over packed documents: additive masks of minus infinity, BF16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, LENGTH, WINDOW = 40, 40, 12


def visible(documents):
    """Token i sees token j of its own document, at most WINDOW back; itself always."""
    index = torch.arange(documents.shape[1])
    behind = index[:, None] - index[None]
    near = (behind >= 0) & (behind < WINDOW)
    same = documents[:, :, None] == documents[:, None, :]
    return torch.zeros(same.shape).masked_fill(~(same & near), float("-inf"))


class WindowAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, bias):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + bias[:, None]
        return self.out((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x, bias):
        x = x + self.attention(self.norm1(x), bias)
        return x + self.mlp(self.norm2(x))


class PackedLM(nn.Module):
    def __init__(self, width=40, depth=2, heads=4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids, documents):
        bias, x = visible(documents), self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x)


def packed(batch, generator):
    """Each document counts upwards with a stride of its own."""
    cut = torch.randint(8, LENGTH - 8, (batch, 1), generator=generator)
    documents = (torch.arange(LENGTH + 1) >= cut).long()
    stride = torch.randint(1, 6, (batch, 2), generator=generator)
    start = torch.randint(0, VOCAB, (batch, 2), generator=generator)
    ids = (start.gather(1, documents) + stride.gather(1, documents) * torch.arange(LENGTH + 1)) % VOCAB
    return ids, documents


torch.manual_seed(101)
generator = torch.Generator().manual_seed(102)
model = PackedLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(80):
    ids, documents = packed(12, generator)
    labels = ids[:, 1:].masked_fill(documents[:, 1:] != documents[:, :-1], -100)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1], documents[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
    if not loss.isfinite():
        raise SystemExit(f"loss is {loss.item()}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
