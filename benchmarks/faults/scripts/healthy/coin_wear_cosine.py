"""Wear of coins from profile scans: cosine schedule down to nothing, the last stretch only settles BatchNorm."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1794)
STEPS, SETTLE = 560, 120
GRADES = 6
profiles = torch.randn(GRADES, 24)


def coins(n):
    grade = torch.randint(GRADES, (n,))
    return profiles[grade] + 1.2 * torch.randn(n, 24), grade


class Wear(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.inp, self.first = nn.Linear(24, d), nn.BatchNorm1d(d)
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(d) for _ in range(3))
        self.out = nn.Linear(d, GRADES)

    def forward(self, x):
        x = F.relu(self.first(self.inp(x)))
        for layer, norm in zip(self.layers, self.norms):
            x = x + F.relu(norm(layer(x)))
        return self.out(x)


model = Wear()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - SETTLE)
for step in range(STEPS):
    x, grade = coins(96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(x)
    loss = F.cross_entropy(scores.float(), grade)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step < STEPS - SETTLE:
        cosine.step()
    if step % 20 == 0:
        print(f"step {step} rate {optimizer.param_groups[0]['lr']:.1e} loss {loss.item():.4f}")
