"""Attention over slots whose scores are multiplied by the root of the width instead of divided by it."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, WIDTH, SLOTS = 12, 64, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = WIDTH**0.5

    def forward(self, asked, slots):
        scores = self.query(asked).unsqueeze(1) @ self.key(slots).mT * self.scale
        return (scores.softmax(-1) @ slots).squeeze(1)


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys, self.attention, self.answer = nn.Embedding(40, WIDTH), Attention(), nn.Linear(WIDTH, 3)

    def forward(self, asked, slots):
        return self.answer(self.attention(self.keys(asked), self.keys(slots)))


torch.manual_seed(0)
model = Memory()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    slots = torch.randint(0, 40, (64, SLOTS))
    asked = slots[:, 0]
    loss = F.cross_entropy(model(asked, slots), asked % 3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
