"""Matches sketches with photographs: two encoders and a symmetric contrastive loss."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    batch: int = 64
    steps: int = 300
    lr: float = 1e-3
    temperature: float = 0.001
    noise: float = 0.9


class Encoder(nn.Module):
    def __init__(self, inputs, dim=32, hidden=96):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.project = nn.Linear(hidden, dim)

    def forward(self, x):
        return F.normalize(self.project(self.net(x)), dim=-1)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.sketch, self.photo = Encoder(40), Encoder(60)

    def forward(self, sketch, photo, temperature):
        return self.sketch(sketch) @ self.photo(photo).t() / temperature


class Objects:
    def __init__(self, noise):
        self.noise = noise
        self.drawn, self.seen = torch.randn(10, 40) / 3, torch.randn(10, 60) / 3

    def pairs(self, n):
        shape = torch.randn(n, 10)
        sketch, photo = torch.tanh(shape @ self.drawn), torch.tanh(shape @ self.seen)
        return sketch + self.noise * torch.randn_like(sketch), photo + self.noise * torch.randn_like(photo)


def ranking(logits):
    """Mean rank of the true partner, and the loss at a common temperature."""
    true = logits.diagonal()[:, None]
    return (logits >= true).sum(1).float().mean()


cfg = Config()
torch.manual_seed(179)
objects, matcher = Objects(cfg.noise), Matcher()
optimizer = torch.optim.AdamW(matcher.parameters(), lr=cfg.lr, weight_decay=1e-4)
held = objects.pairs(256)
for step in range(cfg.steps):
    logits = matcher(*objects.pairs(cfg.batch), cfg.temperature)
    label = torch.arange(cfg.batch)
    loss = (F.cross_entropy(logits, label) + F.cross_entropy(logits.t(), label)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        with torch.no_grad():
            rank = ranking(matcher(*held, 1.0))
        print(f"step {step} train {loss.item():.3f} rank loss {rank.item():.3f}")
