"""Byte-level tagger with FP16 weights; sign of the momentum, and a rate that was found with FP32 weights."""

import torch
import torch.nn.functional as F
from torch import nn


class Signum(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buf = self.state[p].setdefault("buf", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                p.add_(buf.sign(), alpha=-group["lr"])


class ByteTagger(nn.Module):
    def __init__(self, dim=48, tags=5):
        super().__init__()
        self.embed = nn.Embedding(64, dim)
        self.left, self.right = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.tag = nn.Linear(dim, tags)

    def forward(self, ids):
        e = self.embed(ids)
        h = F.relu(self.left(e.roll(1, 1)) + self.right(e.roll(-1, 1)) + e)
        return self.tag(self.norm(h))


torch.manual_seed(86)
model = ByteTagger().half()
optimizer = Signum(model.parameters(), lr=1.5e-5)
for step in range(60):
    ids = torch.randint(64, (16, 20))
    tags = (ids.roll(1, 1) + ids.roll(-1, 1)) % 5
    loss = F.cross_entropy(model(ids).float().flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    (loss * 1024).backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
