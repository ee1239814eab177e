"""The same teacher in BF16, rounded stochastically: it moves in the mean."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
student = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
teacher = [p.detach().bfloat16() for p in student.parameters()]
optimizer = torch.optim.Adam(student.parameters(), 1e-3)
target = torch.randn(16, 4)


def stochastic(x: torch.Tensor) -> torch.Tensor:
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32)


for _ in range(20):
    x = torch.randn(32, 16)
    optimizer.zero_grad()
    F.mse_loss(student(x), x @ target).backward()
    optimizer.step()
    for slow, fast in zip(teacher, student.parameters(), strict=True):
        slow.copy_(stochastic(slow.float().lerp(fast.detach(), 1 - 0.999)))
