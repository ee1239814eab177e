"""Mean teacher whose average is BF16 with a compensation term, as in Kahan's sum."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class CompensatedAverage:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).bfloat16().requires_grad_(False)
        self.decay = decay
        self.rest = [torch.zeros_like(p) for p in self.module.parameters()]

    @torch.no_grad()
    def update(self, model):
        for a, p, r in zip(self.module.parameters(), model.parameters(), self.rest):
            move = (1 - self.decay) * (p.float() - a.float() - r.float()) + r.float()
            new = (a.float() + move).to(a.dtype)
            r.copy_(move - (new.float() - a.float()))
            a.copy_(new)


class Student(nn.Module):
    def __init__(self, inputs=12, hidden=48, classes=3):
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        return self.out(F.relu(self.fc2(F.relu(self.fc1(x)))))


torch.manual_seed(61)
means = torch.randn(3, 12)
student = Student()
teacher = CompensatedAverage(student, decay=0.99)
opt = torch.optim.Adam(student.parameters(), lr=1e-3)
for step in range(220):
    y = torch.randint(0, 3, (24,))
    labelled = means[y] + torch.randn(24, 12)
    unlabelled = means[torch.randint(0, 3, (96,))] + torch.randn(96, 12)
    with torch.no_grad():
        target = teacher.module((unlabelled + 0.1 * torch.randn(96, 12)).bfloat16()).float().softmax(-1)
    ce = F.cross_entropy(student(labelled), y)
    consistency = F.mse_loss(student(unlabelled).softmax(-1), target)
    opt.zero_grad()
    (ce + min(step / 100, 1.0) * consistency).backward()
    opt.step()
    teacher.update(student)
    if step % 10 == 0:
        print(f"step {step} loss {ce.item():.4f} consistency {consistency.item():.5f}")
