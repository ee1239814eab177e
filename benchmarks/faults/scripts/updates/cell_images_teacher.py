"""Mean teacher on cell images: the student learns from few labels and from the teacher's answers on the rest."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(52)
S = 12


def cells(n):
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, S), torch.linspace(-1, 1, S), indexing="ij")
    kind = torch.randint(3, (n,))
    c = 0.4 * torch.randn(n, 2, 1, 1)
    r = ((xx - c[:, 0]) ** 2 + (yy - c[:, 1]) ** 2).sqrt()
    shape = torch.stack([torch.exp(-((r / 0.4) ** 2)), torch.exp(-(((r - 0.5) / 0.15) ** 2)), (r < 0.3).float()])
    return (shape[kind, torch.arange(n)] + 0.4 * torch.randn(n, S, S)).unsqueeze(1), kind


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        )
        self.head = nn.Linear(24 * 9, 3)

    def forward(self, x):
        return self.head(self.features(x))


class MeanTeacher:
    def __init__(self, student, decay, dtype):
        self.net = copy.deepcopy(student).to(dtype).requires_grad_(False)
        self.decay, self.dtype = decay, dtype

    @torch.no_grad()
    def update(self, student):
        for t, s in zip(self.net.parameters(), student.parameters()):
            t.lerp_(s.to(self.dtype), 1 - self.decay)

    @torch.no_grad()
    def __call__(self, x):
        return self.net(x.to(self.dtype)).float().softmax(-1)


student = Net()
before = [p.detach().clone() for p in student.parameters()]
teacher = MeanTeacher(student, decay=0.998, dtype=torch.bfloat16)
optimizer = torch.optim.Adam(student.parameters(), lr=5e-4)
labelled, labels = cells(32)
val_x, val_y = cells(256)
for step in range(400):
    unlabelled, _ = cells(32)
    loss = F.cross_entropy(student(labelled), labels)
    target = teacher(unlabelled)
    noisy = unlabelled + 0.1 * torch.randn_like(unlabelled)
    consistency = (student(noisy).softmax(-1) - target).square().sum(1).mean()
    optimizer.zero_grad()
    (loss + 0.3 * consistency).backward()
    optimizer.step()
    teacher.update(student)
    if step % 20 == 19:
        print(f"{step} sup {loss.item():.4f} teacher loss {F.nll_loss(teacher(val_x).log(), val_y).item():.4f}")
