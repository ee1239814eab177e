"""A T5-like encoder in FP16 whose gated feed-forward layer works with outputs of tens of thousands."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class GatedFF(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.wi0, self.wi1 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.wo = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.wo(F.gelu(self.wi0(x)) * self.wi1(x))


class Encoder(nn.Module):
    def __init__(self, vocab=50, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm1, self.ff1 = RMSNorm(dim), GatedFF(dim, 64)
        self.norm2, self.ff2 = RMSNorm(dim), GatedFF(dim, 64)
        self.norm3, self.head = RMSNorm(dim), nn.Linear(dim, vocab)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.ff1(self.norm1(x))
        x = x + self.ff2(self.norm2(x))
        return self.head(self.norm3(x))


torch.manual_seed(0)
model = Encoder()
with torch.no_grad():  # the scale of the published checkpoint
    for w in (model.ff2.wi0, model.ff2.wi1, model.ff2.wo):
        w.weight.mul_(44.0)
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(60):
    x = torch.randint(50, (32, 12))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float().flatten(0, 1), ((x * 3 + 1) % 50).flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}, {model.ff2(model.norm2(model.embed(x))).abs().max().item():.0f}")
