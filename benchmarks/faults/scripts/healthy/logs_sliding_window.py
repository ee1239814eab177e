"""Next event of a log: causal attention within a window of four, masked by -inf, with padding at the left."""

import torch
import torch.nn.functional as F
from torch import nn

EVENTS, LENGTH, WINDOW, PAD = 18, 16, 4, 0


class WindowAttention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x, padded):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        ago = torch.arange(t)[:, None] - torch.arange(t)
        hidden = (ago < 0) | (ago >= WINDOW) | padded[:, None, None, :]
        hidden = hidden & ~torch.eye(t, dtype=torch.bool)  # every token sees itself, so no row is all -inf
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class LogModel(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(EVENTS, width, padding_idx=PAD)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = WindowAttention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))
        self.head = nn.Linear(width, EVENTS)

    def forward(self, events):
        x = self.embed(events) + self.place
        x = x + self.attention(self.norm1(x), events == PAD)
        return self.head(x + self.mlp(self.norm2(x)))


def logs(n):
    events = [torch.randint(1, EVENTS, (n,)), torch.randint(1, EVENTS, (n,))]
    for _ in range(LENGTH - 1):
        events.append((events[-1] + events[-2]) % (EVENTS - 1) + 1)
    events = torch.stack(events, 1)
    start = torch.randint(LENGTH - 4, (n, 1))
    return torch.where(torch.arange(LENGTH + 1) < start, PAD, events)


torch.manual_seed(103)
model = LogModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(200):
    events = logs(48)
    loss = F.cross_entropy(model(events[:, :-1]).flatten(0, 1), events[:, 1:].flatten(), ignore_index=PAD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
