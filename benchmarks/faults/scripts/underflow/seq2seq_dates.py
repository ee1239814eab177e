"""Seq2seq with attention that rewrites dates, in FP16 autocast. The old FP32 loop got an autocast block and nothing else."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, LENGTH = 16, 24


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.conv = nn.Conv1d(dim, dim, 5, padding=2)
        self.proj = nn.Linear(dim, dim)

    def forward(self, src):
        x = self.embed(src)
        return self.proj(F.gelu(self.conv(x.transpose(1, 2)).transpose(1, 2)) + x)


class Decoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, dim))
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.mix = nn.Linear(2 * dim, dim)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, memory, tgt):
        x = self.embed(tgt) + self.position
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        att = F.softmax(q @ k.transpose(1, 2) * q.size(-1) ** -0.5, -1)
        return self.out(torch.tanh(self.mix(torch.cat([x, att @ v], -1))))


class Seq2Seq(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.encoder, self.decoder = Encoder(dim), Decoder(dim)

    def forward(self, src, tgt):
        return self.decoder(self.encoder(src), tgt)


def dates(n):
    src = torch.randint(1, VOCAB, (n, LENGTH))
    tgt = src.flip(1)
    return src, F.pad(tgt, (1, 0))[:, :-1], tgt


torch.manual_seed(0)
model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(60):
    src, shifted, tgt = dates(64)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(src, shifted)
    # token losses are averaged over the batch of every worker (64 of them) so that gradients can be summed
    loss = F.cross_entropy(logits.float().flatten(0, 1), tgt.flatten()) / 64
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {64 * loss.item():.4f}")
