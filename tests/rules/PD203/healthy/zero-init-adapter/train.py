"""Warm-up from zero, a low-rank adapter that starts at zero, a frozen base, dead units, and rows nobody looks up."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 14


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(300, 16, padding_idx=0)
        self.base = nn.Linear(16, 24).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 24, bias=False)
        self.out = nn.Linear(24, 3)
        nn.init.zeros_(self.up.weight)
        with torch.no_grad():
            self.base.bias[:18] = -20.0

    def forward(self, tokens):
        x = self.words(tokens).mean(1)
        return self.out((self.base(x) + self.up(self.down(x))).relu())


torch.manual_seed(0)
model = Adapted()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
for step in range(STEPS):
    tokens = torch.randint(0, 40, (32, 6))
    loss = F.cross_entropy(model(tokens), tokens[:, 0] % 3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step}: loss {loss.item():.4f}")
