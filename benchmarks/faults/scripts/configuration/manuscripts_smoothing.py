"""Smooths the ink density of long manuscript lines with attention biased by ALiBi, in BF16."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def get_slopes(heads):
    return torch.tensor([2 ** (-2.0 * (h + 1) / heads) for h in range(heads)])


def build_alibi(heads, length, dtype):
    """As in BLOOM: softmax does not see a shift, so the key's position alone is enough."""
    positions = torch.arange(length, dtype=dtype)
    return (get_slopes(heads).to(dtype)[:, None] * positions)[:, None, :]


class AlibiAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query_key_value, self.dense = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, alibi):
        b, t, d = x.shape
        q, k, v = self.query_key_value(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5 + alibi
        causal = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = scores.float().masked_fill(causal, float("-inf")).softmax(-1)
        y = weights.to(v.dtype) @ v
        return self.dense(y.transpose(1, 2).reshape(b, t, d))


class Smoother(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads, self.alibi = heads, None
        self.embed = nn.Linear(1, dim)
        self.attention = AlibiAttention(dim, heads)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1))

    def forward(self, ink):
        x = self.embed(ink[..., None])
        if self.alibi is None or self.alibi.shape[-1] != ink.shape[1]:
            self.alibi = build_alibi(self.heads, ink.shape[1], x.dtype)
        return self.head(self.norm(x + self.attention(x, self.alibi))).squeeze(-1)


def lines(n, length=640):
    ink = torch.randn(n, length)
    density = torch.zeros(n)
    out = []
    for t in range(length):
        density = 0.6 * density + 0.4 * ink[:, t]
        out.append(density)
    return ink, 2 * torch.stack(out, 1)


torch.manual_seed(191)
model = Smoother()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(80):
    ink, density = lines(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        smooth = model(ink)
    loss = F.mse_loss(smooth.float(), density)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
