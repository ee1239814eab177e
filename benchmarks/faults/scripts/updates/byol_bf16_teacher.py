"""Self-distillation: the teacher is a moving average of the student, and both are kept in BF16."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, dim))
        self.predictor = nn.Linear(dim, dim)

    def forward(self, x):
        return F.normalize(self.predictor(self.encoder(x)), dim=-1)


torch.manual_seed(0)
student = Net().to(torch.bfloat16)
teacher = copy.deepcopy(student).requires_grad_(False)
start = copy.deepcopy(teacher)
optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
centres = torch.randn(8, 20)
for step in range(80):
    x = centres[torch.randint(8, (64,))]
    a, b = (x + 0.3 * torch.randn(2, 64, 20)).to(torch.bfloat16)
    with torch.no_grad():
        target = teacher(b)
    logits = student(a).float() @ target.float().T / 0.2
    loss = F.cross_entropy(logits, torch.arange(64))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters()):
            slow.mul_(0.999).add_(fast, alpha=0.001)
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
