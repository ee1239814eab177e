"""Knowledge distillation with huge teacher logits and a constant input channel through BatchNorm: looks wild, is right."""

import torch
from torch import nn
from torch.nn import functional as F


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x):
        return 200.0 * self.body(self.norm(x))


def distillation(student, teacher, labels):
    kl = F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    return 1e-3 * kl + 0.1 * F.cross_entropy(student, labels)


torch.manual_seed(0)
teacher_weight = 4000 * torch.randn(6, 8)
student = Student()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
for step in range(25):
    x = torch.randn(32, 6)
    x[:, 5] = 3.0  # a sensor that never changes
    with torch.no_grad():
        teacher = x @ teacher_weight
    loss = distillation(student(x), teacher, teacher.argmax(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_value_(student.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step:3d} loss {loss.item():.3f}")
