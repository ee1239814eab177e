"""Twelve pre-norm blocks with gradient checkpointing in BF16 autocast; residual stream grows, the last norm takes care."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(610)


class FeedForward(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + 2 * self.down(F.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, dim=40, depth=12):
        super().__init__()
        self.embed, self.blocks = nn.Linear(20, dim), nn.ModuleList(FeedForward(dim) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 7)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


model, plane = Deep(), torch.randn(20, 7)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(120):
    x = torch.randn(64, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), (x @ plane).argmax(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 6 == 5:
        print(f"step {step + 1} loss {loss.item():.4f}")
