"""Masked language modelling with a little BERT on documents cut into segments, BF16 autocast, accumulation of 2."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

PAD, MASK = 0, 1


@dataclass
class Config:
    vocab: int = 100
    hidden: int = 32
    heads: int = 4
    layers: int = 2
    length: int = 16


class BertSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.query, self.key, self.value = (nn.Linear(c.hidden, c.hidden) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, padding):
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(padding[:, None, None, :], -torch.inf)
        weights = self.dropout(scores.softmax(-1))
        return (weights @ v).transpose(1, 2).flatten(2)


class BertLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = BertSelfAttention(c)
        self.dense = nn.Linear(c.hidden, c.hidden)
        self.norm1, self.norm2 = nn.LayerNorm(c.hidden), nn.LayerNorm(c.hidden)
        self.ffn = nn.Sequential(nn.Linear(c.hidden, 4 * c.hidden), nn.GELU(), nn.Linear(4 * c.hidden, c.hidden))

    def forward(self, x, padding):
        x = self.norm1(x + self.dense(self.attention(x, padding)))
        return self.norm2(x + self.ffn(x))


class BertForMaskedLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = nn.Embedding(c.vocab, c.hidden, padding_idx=PAD)
        self.positions = nn.Embedding(c.length, c.hidden)
        self.layers = nn.ModuleList(BertLayer(c) for _ in range(c.layers))
        self.decoder = nn.Linear(c.hidden, c.vocab)

    def forward(self, input_ids, labels):
        x = self.embeddings(input_ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x, input_ids == PAD)
        logits = self.decoder(x).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def segments(lengths, size, vocab):
    """Cut each document into full segments; the rest is padded."""
    for length in lengths:
        document = torch.randint(2, vocab, (length,))
        for start in range(0, length + 1, size):
            piece = document[start : start + size]
            yield F.pad(piece, (0, size - len(piece)), value=PAD)


def mask_tokens(ids):
    chosen = (torch.rand(ids.shape) < 0.2) & (ids != PAD)
    chosen[:, 0] |= ids[:, 0] != PAD
    return torch.where(chosen, MASK, ids), torch.where(chosen, ids, -100)


def main():
    torch.manual_seed(42)
    config = Config()
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pieces = list(segments([37, 41, 25, 58, 43, 29, 60, 21, 35, 48, 39, 27], config.length, config.vocab))
    for i in range(0, len(pieces) - 4, 4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(*mask_tokens(torch.stack(pieces[i : i + 4])))
        (loss / 2).backward()
        if i // 4 % 2:
            optimizer.step()
            optimizer.zero_grad()
        print(i // 4, loss.item())


main()
