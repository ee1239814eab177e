"""Two-digit addition with a small transformer encoder; answers are read off the last three positions."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    dim: int = 48
    heads: int = 4
    layers: int = 2
    batch: int = 128
    steps: int = 240
    lr: float = 3e-2
    seed: int = 10


class Adder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tokens = nn.Embedding(13, cfg.dim)
        self.positions = nn.Parameter(0.02 * torch.randn(8, cfg.dim))
        layer = nn.TransformerEncoderLayer(cfg.dim, cfg.heads, 4 * cfg.dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, cfg.layers)
        self.head = nn.Linear(cfg.dim, 10)

    def forward(self, ids):
        return self.head(self.encoder(self.tokens(ids) + self.positions)[:, -3:])


def problems(n):
    """a1 a0 + b1 b0 = ? ? ?, as tokens; 10 is the plus, 11 the sign of equality, 12 a blank."""
    a, b = torch.randint(100, (n,)), torch.randint(100, (n,))
    c = a + b
    plus, blank = torch.full_like(a, 10), torch.full_like(a, 12)
    ids = torch.stack([a // 10, a % 10, plus, b // 10, b % 10, blank, blank, blank], 1)
    return ids, torch.stack([c // 100, c // 10 % 10, c % 10], 1)


def main(cfg):
    torch.manual_seed(cfg.seed)
    model = Adder(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    for step in range(1, cfg.steps + 1):
        ids, digits = problems(cfg.batch)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), digits.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            right = (logits.argmax(-1) == digits).float().mean().item()
            print(f"step {step} loss {loss.item():.4f} digits right {right:.3f}")
    return model


if __name__ == "__main__":
    model = main(Config())
