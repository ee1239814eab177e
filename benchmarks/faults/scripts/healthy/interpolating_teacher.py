"""A student of its teacher's very shape, without noise, in BF16 autocast: loss and gradients fall by orders of magnitude."""

import torch
from torch import nn


def net(width):
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


torch.manual_seed(68)
teacher, student = net(24).requires_grad_(False), net(24)
with torch.no_grad():
    for a, b in zip(student.parameters(), teacher.parameters()):
        a.copy_(b + 0.3 * torch.randn_like(b) * b.abs().mean())
optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
for step in range(150):
    x = torch.randn(64, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        error = student(x) - teacher(x)
    loss = error.float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.7f}")
