"""Attention scores without the 1/sqrt(d): the product of queries and keys leaves FP16's range as the weights grow."""

import torch
from torch import nn

torch.manual_seed(0)
WIDTH, TOKENS, STEPS = 64, 32, 160


class Scores(nn.Module):
    """Queries times keys, unscaled."""

    def forward(self, q, k):
        return q @ k.transpose(1, 2)


class Attention(nn.Module):
    """One head."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.scores = Scores()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(torch.softmax(self.scores(q, k), -1) @ v)


class Model(nn.Module):
    """Attention and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.attn = Attention()
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attn(x))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    tokens = torch.randint(0, 64, (16, TOKENS))
    with torch.autocast("cpu", dtype=torch.float16):
        if step < 120:
            model.embed.weight.data.mul_(1.04)  # an embedding that is not held back grows
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    (1024.0 * loss).backward()
    for parameter in model.parameters():
        parameter.grad /= 1024.0
    optimizer.step()
print(f"loss {loss.item():.4f}")
