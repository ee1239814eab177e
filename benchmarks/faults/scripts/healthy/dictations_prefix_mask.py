"""Prefix-LM attention with -inf masks in BF16 autocast; padding rows may look at themselves, so no row is empty."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(605)
VOCAB, DIM, T = 24, 32, 20


class MaskedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x, bias):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / DIM**0.5
        return self.o((scores + bias).float().softmax(-1).to(x.dtype) @ self.v(x))


class PrefixLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, DIM, padding_idx=0), nn.Embedding(T, DIM)
        self.norm1, self.attn = nn.LayerNorm(DIM), MaskedAttention()
        self.norm2, self.mlp = nn.LayerNorm(DIM), nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, prefix):
        t = ids.shape[1]
        seen = torch.ones(t, t).tril().bool() | (torch.arange(t) < prefix[:, None, None])
        seen = (seen & (ids != 0)[:, None, :]) | torch.eye(t).bool()
        bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        x = self.embed(ids) + self.position.weight[:t]
        x = x + self.attn(self.norm1(x), bias)
        return self.lm_head(x + self.mlp(self.norm2(x)))


model = PrefixLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(180):
    ids = (torch.randint(1, VOCAB, (24, 1)) + torch.randint(1, 4, (24, 1)) * torch.arange(T)) % (VOCAB - 1) + 1
    ids[torch.arange(T) >= torch.randint(8, T + 1, (24, 1))] = 0
    prefix = torch.randint(1, 5, (24,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids, prefix)
    loss = F.cross_entropy(logits[:, 5:-1].float().flatten(0, 1), ids[:, 6:].flatten(), ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
