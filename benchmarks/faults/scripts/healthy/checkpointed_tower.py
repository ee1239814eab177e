"""A deep pre-norm tower under BF16 autocast, recomputed in the backward pass; branches start at zero."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Branch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 48), nn.Linear(48, width)
        self.gain = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, width=24, depth=8):
        super().__init__()
        self.inp, self.out = nn.Linear(10, width), nn.Linear(width, 4)
        self.branches = nn.ModuleList(Branch(width) for _ in range(depth))

    def forward(self, x):
        h = self.inp(x)
        for branch in self.branches:
            h = checkpoint(branch, h, use_reentrant=False)
        return self.out(h)


torch.manual_seed(3218)
model, centres = Tower(), torch.randn(4, 3, 10)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(50):
    y = torch.randint(0, 4, (48,))
    x = centres[y, torch.randint(0, 3, (48,))] + 0.5 * torch.randn(48, 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
