"""A ControlNet-like branch with zero-initialised projections beside a frozen net (BF16 autocast)."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(607)


class Base(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.proj_in = nn.Linear(16, dim)
        self.block1, self.block2 = (nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.SiLU()) for _ in range(2))
        self.proj_out = nn.Linear(dim, 16)


class Controlled(nn.Module):
    def __init__(self, base, dim=48):
        super().__init__()
        self.base, self.branch = base.requires_grad_(False), copy.deepcopy(base).requires_grad_(True)
        self.branch.proj_out = None
        self.hint = nn.Linear(16, dim)
        self.zero1, self.zero2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        for layer in (self.zero1, self.zero2):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x, hint):
        c = self.branch.proj_in(x) + self.hint(hint)
        c1 = self.branch.block1(c)
        c2 = self.branch.block2(c1)
        h = self.base.block1(self.base.proj_in(x)) + self.zero1(c1)
        return self.base.proj_out(self.base.block2(h) + self.zero2(c2))


model = Controlled(Base())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
mix = torch.randn(16, 16) / 4
for step in range(240):
    x, hint = torch.randn(2, 64, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x, hint)
    loss = F.mse_loss(out.float(), torch.tanh(hint @ mix))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 11:
        print(f"step {step + 1} loss {loss.item():.4f}")
