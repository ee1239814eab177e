"""Mean teacher for few labels: the student follows its moving average, which is what gets deployed."""

import copy

import torch
from torch import nn
from torch.nn import functional as F


def network(inputs=20, hidden=64, classes=5):
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.LayerNorm(hidden),
        nn.SiLU(),
        nn.Linear(hidden, hidden),
        nn.SiLU(),
        nn.Linear(hidden, classes),
    )


class MeanTeacher:
    """The teacher lives in BF16: it is only ever evaluated."""

    def __init__(self, student, momentum, dtype=torch.bfloat16):
        self.student, self.momentum = student, momentum
        self.teacher = copy.deepcopy(student).to(dtype).requires_grad_(False)
        self.start = [p.clone() for p in self.teacher.parameters()]
        self.dtype = dtype

    @torch.no_grad()
    def update(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
            slow.lerp_(fast.to(slow.dtype), 1 - self.momentum)

    @torch.no_grad()
    def targets(self, x):
        return self.teacher(x.to(self.dtype)).float().softmax(-1)

    def unmoved(self):
        """The share of the teacher's weights that are where they began."""
        same = [p == s for p, s in zip(self.teacher.parameters(), self.start)]
        return float(torch.cat([x.flatten() for x in same]).double().mean())


def clusters(n, centres):
    label = torch.randint(len(centres), (n,))
    return centres[label] + 0.9 * torch.randn(n, centres.shape[1]), label


def main():
    torch.manual_seed(21005)
    centres = torch.randn(5, 20)
    student = network()
    mean_teacher = MeanTeacher(student, momentum=0.998)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    few_x, few_y = clusters(60, centres)
    held_x, held_y = clusters(500, centres)
    for step in range(200):
        crowd, _ = clusters(64, centres)
        supervised = F.cross_entropy(student(few_x), few_y)
        noisy = crowd + 0.2 * torch.randn_like(crowd)
        consistency = -(mean_teacher.targets(crowd) * student(noisy).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        (supervised + 0.5 * consistency).backward()
        optimizer.step()
        mean_teacher.update()
        if step % 4 == 0:
            held = -mean_teacher.targets(held_x).log()[torch.arange(len(held_y)), held_y].mean().item()
            print(f"{step} held-out loss of the teacher: loss {held:.4f}")
    return mean_teacher


if __name__ == "__main__":
    mean_teacher = main()
