"""A teacher that is kept as a list of BF16 tensors; a step of 0.001 of the distance is below half an ulp."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
student = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
teacher = [p.detach().bfloat16() for p in student.parameters()]
optimizer = torch.optim.Adam(student.parameters(), 1e-3)
target = torch.randn(16, 4)

for _ in range(20):
    x = torch.randn(32, 16)
    optimizer.zero_grad()
    F.mse_loss(student(x), x @ target).backward()
    optimizer.step()
    for slow, fast in zip(teacher, student.parameters(), strict=True):
        slow.lerp_(fast.detach().bfloat16(), 1 - 0.999)
