"""Matching bird calls and field notes: two encoders and a learned temperature, trained on a small archive."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(501)
ARCHIVE, D, STEPS = 256, 24, 700
mix_call, mix_note = torch.randn(8, 20) / 3, torch.randn(8, 14) / 3


def pairs(n, noise=0.7):
    z = torch.randn(n, 8)
    return z @ mix_call + noise * torch.randn(n, 20), z @ mix_note + noise * torch.randn(n, 14)


class Encoder(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.inp, self.norm = nn.Linear(n_in, 64), nn.LayerNorm(64)
        self.mid, self.out = nn.Linear(64, 64), nn.Linear(64, D)

    def forward(self, x):
        x = F.gelu(self.norm(self.inp(x)))
        return F.normalize(self.out(F.gelu(self.mid(x))), dim=-1)


class Similarity(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, a, b):
        return self.log_scale.exp() * a @ b.T


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.call, self.note = Encoder(20), Encoder(14)
        self.similarity = Similarity()

    def forward(self, call, note):
        return self.similarity(self.call(call), self.note(note))


def symmetric(logits):
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


model = Matcher()
optimizer = torch.optim.AdamW(
    [
        {"params": [*model.call.parameters(), *model.note.parameters()], "lr": 1e-3},
        {"params": model.similarity.parameters(), "lr": 5e-2, "weight_decay": 0.0},
    ],
    weight_decay=0.01,
)
calls, notes = pairs(ARCHIVE)
held_out = pairs(128)
for step in range(STEPS):
    rows = torch.randperm(ARCHIVE)[:64]
    value = symmetric(model(calls[rows], notes[rows]))
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    if step % 25 == 24:
        model.eval()
        with torch.no_grad():
            print(f"step {step} train {value.item():.4f} held-out loss {symmetric(model(*held_out)).item():.4f}")
        model.train()
