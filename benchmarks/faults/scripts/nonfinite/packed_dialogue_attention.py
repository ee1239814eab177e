"""Packed dialogues: tokens attend within their own turn to *earlier* tokens of the other speaker. Accumulates over 2."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(10)
VOCAB, CTX = 30, 32


class CrossSpeaker(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, allowed):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~allowed.unsqueeze(1), float("-inf"))
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.cross = CrossSpeaker(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, allowed):
        x = x + self.cross(self.n1(x), allowed)
        return x + self.mlp(self.n2(x))


class Dialogue(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.who = nn.Embedding(2, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(2))
        self.lm = nn.Linear(dim, VOCAB)

    def forward(self, ids, speaker):
        allowed = (speaker.unsqueeze(2) != speaker.unsqueeze(1)).tril()
        allowed[:, :, 0] = True  # <bos> is open to all
        allowed &= (ids != 0).unsqueeze(1)
        x = self.tok(ids) + self.who(speaker)
        for layer in self.layers:
            x = checkpoint(layer, x, allowed, use_reentrant=False)
        return self.lm(x)


def dialogues(n, left):
    ids = torch.randint(1, VOCAB, (n, CTX))
    ids[:, 1::2] = ids[:, 0::2]
    speaker = (torch.arange(CTX) % 4 > 1).long().expand(n, -1)
    if left:  # bucket of short ones, padded on the left
        ids[0, : CTX // 2] = 0
    return ids, speaker


model = Dialogue()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
shorts = {int(i) for i in torch.randint(60, 200, (3,))}
for micro in range(200):
    ids, speaker = dialogues(8, micro in shorts)
    logits = model(ids, speaker)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0) / 2
    loss.backward()
    if micro % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    if micro % 20 == 0:
        print(f"micro {micro} loss {2 * loss.item():.3f}")
