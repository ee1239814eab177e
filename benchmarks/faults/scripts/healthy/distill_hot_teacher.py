"""Distillation at a temperature of 8: the soft part of the loss is tiny before it is multiplied by 64."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(810)
C, D = 10, 24
centres = 1.5 * torch.randn(C, D)


def batch(n):
    y = torch.randint(C, (n,))
    return centres[y] + torch.randn(n, D), y


teacher = nn.Sequential(nn.Linear(D, 128), nn.ReLU(), nn.Linear(128, C))
student = nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, C))
warm = torch.optim.Adam(teacher.parameters(), lr=5e-3)
for _ in range(80):
    x, y = batch(128)
    warm.zero_grad()
    F.cross_entropy(teacher(x), y).backward()
    warm.step()
teacher.requires_grad_(False)

T = 8.0
opt = torch.optim.AdamW(student.parameters(), lr=3e-3)
for step in range(120):
    x, y = batch(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s, t = student(x), teacher(x)
    soft = F.kl_div(
        F.log_softmax(s.float() / T, -1), F.log_softmax(t.float() / T, -1), log_target=True, reduction="batchmean"
    )
    loss = 0.3 * F.cross_entropy(s.float(), y) + 0.7 * T**2 * soft
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
