"""Mussel beds from drone tiles: few labels, mean teacher. Everything in bfloat16, the teacher is what gets shipped."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(61)
FEATURES = 20
direction = torch.randn(FEATURES)


def tiles(n):
    x = torch.randn(n, FEATURES)
    return x, ((x @ direction + 0.5 * (x[:, :3] ** 2).sum(1)) > 1.5).long()


def net():
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))


@torch.no_grad()
def follow(teacher, student, decay=0.998):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(decay).add_(s.to(t.dtype), alpha=1 - decay)


student = net()
teacher = copy.deepcopy(student).to(torch.bfloat16).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
val_x, val_y = tiles(1024)
for step in range(250):
    x, y = tiles(32)
    unlabeled, _ = tiles(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        soft = teacher(unlabeled).float().softmax(-1)
        supervised = F.cross_entropy(student(x).float(), y)
        consistency = F.mse_loss(student(unlabeled + 0.1 * torch.randn_like(unlabeled)).float().softmax(-1), soft)
    objective = supervised + 0.1 * min(step / 100, 1.0) * consistency
    optimizer.zero_grad()
    objective.backward()
    optimizer.step()
    follow(teacher, student)
    if step % 10 == 9:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            print(f"step {step + 1} teacher loss {F.cross_entropy(teacher(val_x).float(), val_y).item():.4f}")
