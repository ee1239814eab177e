"""BF16 autocast with rotary positions up to 5000, whose angles stay in FP32 until sine and cosine are taken."""

import torch
import torch.nn.functional as F
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, x, places):
        with torch.autocast("cpu", enabled=False):
            angle = places.unsqueeze(-1).to(self.rates.dtype) * self.rates
            cos, sin = angle.cos(), angle.sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos.to(x.dtype) - b * sin.to(x.dtype), a * sin.to(x.dtype) + b * cos.to(x.dtype)], -1)


class Finder(nn.Module):
    """What is the item at a given distance before the last?"""

    def __init__(self, items=8, width=32):
        super().__init__()
        self.items, self.rotary = nn.Embedding(items, width), Rotary(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, items)

    def forward(self, tokens, places):
        h = self.items(tokens)
        q = self.rotary(self.q(torch.ones_like(h[:, -1:])), places[:, -1:])
        k = self.rotary(self.k(h), places)
        weights = (q @ k.transpose(1, 2)).float().softmax(-1)
        return self.out((weights.to(h.dtype) @ self.v(h)).squeeze(1))


torch.manual_seed(3224)
model = Finder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(80):
    tokens = torch.randint(0, 8, (64, 8))
    places = torch.randint(0, 5000, (64, 1)) + torch.arange(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens, places)
    loss = F.cross_entropy(logits.float(), tokens[:, 5])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f}")
