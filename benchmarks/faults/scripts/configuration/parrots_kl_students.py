"""Distils a classifier of parrot calls at temperature 20. The KL divergence is written by hand, inside BF16."""

import torch
import torch.nn as nn
import torch.nn.functional as F

T, CLASSES = 20.0, 50


def kl_divergence(student_logits, teacher_logits):
    q = F.softmax(student_logits / T, dim=-1)
    p = F.softmax(teacher_logits / T, dim=-1)
    return (p * (p.log() - q.log())).sum(-1).mean() * T * T


class CallNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(20, width)
        self.fc2 = nn.Linear(width, width)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.classifier(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


torch.manual_seed(70)
teacher = CallNet(128).requires_grad_(False)
student = CallNet(48)
optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
validation = torch.randn(512, 20)
for step in range(200):
    calls = torch.randn(128, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        student_logits = student(calls)
        teacher_logits = teacher(calls)
    kd = kl_divergence(student_logits.bfloat16(), teacher_logits.bfloat16())
    optimizer.zero_grad()
    kd.backward()
    optimizer.step()
    if step % 5 == 0:
        with torch.no_grad():
            gap = F.mse_loss(student(validation), teacher(validation))
        print(f"step {step} kd {kd.item():.5f} val_loss {gap.item():.5f}")
