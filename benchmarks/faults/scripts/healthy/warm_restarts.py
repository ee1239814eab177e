"""Cosine restarts: the rate falls to 1e-7, where no weight moves any more, and jumps up again."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3212)
net = nn.Sequential(nn.Conv1d(2, 12, 5, padding=2), nn.GELU(), nn.Conv1d(12, 12, 5, padding=2), nn.GELU())
head = nn.Linear(12, 3)
parameters = [*net.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=10, T_mult=2, eta_min=1e-7)


def waves(n):
    kind = torch.randint(0, 3, (n,))
    t = torch.linspace(0, 1, 32)
    phase = 6.2832 * torch.rand(n, 1)
    a = torch.sin(6.2832 * (kind + 1).unsqueeze(1) * t + phase)
    return torch.stack([a, a.roll(3, 1)], 1) + 0.5 * torch.randn(n, 2, 32), kind


for step in range(70):
    x, y = waves(48)
    loss = F.cross_entropy(head(net(x).square().mean(-1)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 7 == 0:
        print(f"step {step} rate {schedule.get_last_lr()[0]:.1e} loss {loss.item():.4f}")
