"""Which valley a speaker comes from: a GRU over formant tracks, attentive pooling, eight dialects."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class AttentivePool(nn.Module):
    """A few learnt queries look at all frames; dot products grow with the width, hence the scale."""

    def __init__(self, dim, queries=4):
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, dim))
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.scale = math.sqrt(dim)

    def weights(self, frames):
        scores = torch.einsum("qd,btd->bqt", self.query, self.key(frames)) * self.scale
        return scores.softmax(-1)

    def forward(self, frames):
        return (self.weights(frames) @ self.value(frames)).flatten(1)


class DialectNet(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.front = nn.Sequential(nn.Linear(12, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU())
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.after = nn.LayerNorm(dim)
        self.pool = AttentivePool(dim)
        self.head = nn.Sequential(nn.Linear(4 * dim, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x):
        frames, _ = self.rnn(self.front(self.norm(x)))
        return self.head(self.pool(self.after(frames)))


class Speakers:
    def __init__(self):
        self.vowels = torch.randn(8, 6, 12, generator=torch.Generator().manual_seed(1))

    def utterances(self, n, g, frames=40):
        dialect = torch.randint(0, 8, (n,), generator=g)
        vowel = torch.randint(0, 6, (n, frames), generator=g)
        clean = 0.6 * self.vowels[dialect[:, None], vowel]
        return clean + 1.6 * torch.randn(n, frames, 12, generator=g), dialect


torch.manual_seed(13)
g = torch.Generator().manual_seed(14)
speakers = Speakers()
val_x, val_y = speakers.utterances(512, torch.Generator().manual_seed(15))
net = DialectNet()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.02)
steps = 240
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.2)
for step in range(steps):
    net.train()
    x, y = speakers.utterances(48, g)
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 12 == 11:
        net.eval()
        with torch.no_grad():
            out = net(val_x)
        print(f"step {step + 1} train {loss.item():.3f} loss {F.cross_entropy(out, val_y):.4f}")
