"""Two views and a slow teacher in FP32, decay 0.996, under BF16 autocast; a predictor keeps it from collapsing."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def net(a, b):
    return nn.Sequential(nn.Linear(a, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, b))


def view(x):
    return x + 0.3 * torch.randn_like(x)


torch.manual_seed(3234)
student, predictor = net(16, 12), net(12, 12)
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=4e-3)
basis = torch.randn(4, 16)
for step in range(60):
    x = torch.randn(96, 4) @ basis
    a, b = view(x), view(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = predictor(student(a))
        with torch.no_grad():
            z = teacher(b)
    loss = 2 - 2 * F.cosine_similarity(p.float(), z.float()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.lerp_(s, 1 - 0.996)
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
