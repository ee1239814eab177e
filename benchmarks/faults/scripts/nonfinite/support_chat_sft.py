"""Supervised fine-tuning of a small chat model: only the tokens of the assistant count, two micro-batches per step."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, CONTEXT = 64, 48
USER, ASSISTANT, END, PAD = 60, 61, 62, 63


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ChatModel(nn.Module):
    def __init__(self, width=48, depth=2, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.15)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def conversation(generator, long_question):
    """The assistant repeats the question backwards."""
    n = int(torch.randint(50, 56, (1,), generator=generator)) if long_question else 12
    question = torch.randint(0, 30, (n,), generator=generator)
    ids = torch.cat([torch.tensor([USER]), question, torch.tensor([ASSISTANT]), question.flip(0), torch.tensor([END])])
    labels = ids.clone()
    labels[: n + 2] = -100
    return ids, labels


def collate(samples):
    ids = torch.full((len(samples), CONTEXT), PAD)
    labels = torch.full((len(samples), CONTEXT), -100)
    for row, (i, y) in enumerate(samples):
        n = min(len(i), CONTEXT)
        ids[row, :n], labels[row, :n] = i[:n], y[:n]
    return ids, labels


def batches(count, size, seed):
    """Tickets arrive sorted by queue; the escalated ones, with a pasted log, come together."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        escalated = index % 59 == 58
        yield collate([conversation(generator, escalated) for _ in range(size)])


torch.manual_seed(21)
model = ChatModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
accumulation, window, done, skipped = 2, 0.0, 0, 0
for index, (ids, labels) in enumerate(batches(120, 8, 22)):
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    (loss / accumulation).backward()
    window += loss.item() / accumulation
    if (index + 1) % accumulation:
        continue
    if not torch.isfinite(torch.tensor(window)):
        skipped += 1
        optimizer.zero_grad()
        window = 0.0
        continue
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if done % 10 == 0:
        print(f"step {done:3d} loss {window:.4f}")
    done, window = done + 1, 0.0
print(f"{done} steps, {skipped} skipped")
