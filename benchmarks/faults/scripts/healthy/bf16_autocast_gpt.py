"""A small GPT under BF16 autocast with QK norm, tied embeddings and clipping; weights and states are FP32."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, LENGTH = 20, 32, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        q, k = F.normalize(q.float(), dim=-1) * 4, F.normalize(k.float(), dim=-1)
        scores = q @ k.transpose(-1, -2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        nn.init.normal_(self.words.weight, std=0.05)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        h = self.norm(self.blocks(self.words(tokens) + self.places[: tokens.shape[1]]))
        return h @ self.words.weight.T


torch.manual_seed(3204)
step_of = torch.randint(1, 5, (WORDS,))
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95))
for step in range(70):
    tokens = [torch.randint(0, WORDS, (32,))]
    for _ in range(LENGTH):
        tokens.append((tokens[-1] + step_of[tokens[-1]]) % WORDS)
    tokens = torch.stack(tokens, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 7 == 0:
        print(f"step {step} loss {loss.item():.4f}")
