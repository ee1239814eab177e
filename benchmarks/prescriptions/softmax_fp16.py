"""A softmax written by hand, without subtracting the maximum: exp leaves FP16's range as the logits grow."""

import torch
from torch import nn

torch.manual_seed(0)
WIDTH, TOKENS, STEPS = 64, 32, 160


class ExpSoftmax(nn.Module):
    """exp(x) / sum(exp(x)), in whatever dtype it is given."""

    def forward(self, scores):
        weights = torch.exp(scores)
        return weights / weights.sum(-1, keepdim=True)


class Attention(nn.Module):
    """One head."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.softmax = ExpSoftmax()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(self.softmax(q @ k.transpose(1, 2) / WIDTH**0.5) @ v)


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
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(STEPS):
    tokens = torch.randint(0, 64, (16, TOKENS))
    with torch.autocast("cpu", dtype=torch.float16):
        if step < 100:
            model.embed.weight.data.mul_(1.012)  # the temperature is annealed
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"loss {loss.item():.4f}")
