"""Beats of an electrocardiogram, FP16: cosine with warm restarts down to zero; the scaler starts high and finds its place."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(84)
T, KINDS = 40, 5
BUMPS = torch.rand(KINDS, 3)


def beats(n):
    kind = torch.randint(KINDS, (n,))
    t = torch.linspace(0, 1, T)
    x = sum(torch.exp(-(((t - BUMPS[kind, i, None]) / 0.05) ** 2)) * (-1) ** i for i in range(3))
    return (x + 0.5 * torch.randn(n, T)).unsqueeze(1), kind


net = nn.Sequential(
    *(nn.Conv1d(1, 16, 7, padding=3), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool1d(2)),
    *(nn.Conv1d(16, 24, 5, padding=2), nn.GroupNorm(4, 24), nn.ReLU(), nn.AdaptiveAvgPool1d(5)),
    *(nn.Flatten(), nn.Linear(120, KINDS)),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.08, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=60, T_mult=2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=100)
for step in range(420):
    x, kind = beats(32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x).float(), kind)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    if step % 7 == 0:
        print(f"step {step} rate {schedule.get_last_lr()[0]:.4f} scale {scaler.get_scale():.0f} loss {loss.item():.4f}")
