"""A student learns from a teacher's soft targets at a high temperature, everything of the student in FP16."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp(inputs, width, outputs):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class Distillation:
    def __init__(self, teacher, student, temperature):
        self.teacher, self.student, self.temperature = teacher.eval(), student, temperature
        for p in self.teacher.parameters():
            p.requires_grad_(False)

    def loss(self, x):
        t = self.temperature
        with torch.no_grad():
            target = F.softmax(self.teacher(x) / t, -1)
        return F.kl_div(F.log_softmax(self.student(x).float() / t, -1), target, reduction="batchmean")


class HalfStudent(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.net = mlp(20, 48, classes)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.net(x)


torch.manual_seed(3105)
CLASSES = 512
teacher = mlp(20, 64, CLASSES)
with torch.no_grad():
    teacher[-1].weight.mul_(8)
student = HalfStudent(CLASSES)
job = Distillation(teacher, student, temperature=60.0)
optimizer = torch.optim.AdamW(student.parameters(), lr=4e-3, weight_decay=0.0, eps=1e-12)

for epoch in range(5):
    for _ in range(10):
        x = torch.randn(64, 20)
        loss = job.loss(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            gap = (student(x).float() - teacher(x)).square().mean()
    print(f"epoch {epoch} kl {loss.item():.3e} logit loss {gap.item():.4f}")
