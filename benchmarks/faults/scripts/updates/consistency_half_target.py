"""A consistency model in two dimensions: the student in FP32, its moving average, which is the target, in FP16."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

DECAY = 0.9998


class Denoiser(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.inp, self.time = nn.Linear(2, dim), nn.Linear(8, dim)
        self.mid1, self.mid2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 2)

    def forward(self, x, t):
        freqs = torch.exp2(torch.arange(4, device=t.device)).to(x.dtype)
        code = torch.cat([(t[:, None] * freqs).sin(), (t[:, None] * freqs).cos()], -1)
        h = F.silu(self.inp(x) + self.time(code))
        h = h + F.silu(self.mid1(h))
        h = h + F.silu(self.mid2(h))
        keep = (0.1 / (t + 0.1))[:, None]
        return keep * x + (1 - keep) * self.out(h)


@torch.no_grad()
def follow(target, student):
    for slow, fast in zip(target.parameters(), student.parameters()):
        slow.lerp_(fast.to(slow.dtype), 1 - DECAY)


torch.manual_seed(12)
student = Denoiser()
target = copy.deepcopy(student).half().requires_grad_(False)
start = copy.deepcopy(target)
optimizer = torch.optim.RAdam(student.parameters(), lr=2e-3)
for step in range(250):
    angle = 6.283 * torch.rand(128)
    clean = torch.stack([angle.cos(), angle.sin()], -1) * (1 + (angle > 3).float())[:, None]
    t = 0.1 + torch.rand(128)
    noise = torch.randn(128, 2)
    with torch.no_grad():
        goal = target((clean + (t - 0.1)[:, None] * noise).half(), (t - 0.1).half()).float()
    found = student(clean + t[:, None] * noise, t)
    loss = 0.5 * F.mse_loss(found, goal) + 0.5 * F.mse_loss(found, clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follow(target, student)
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
