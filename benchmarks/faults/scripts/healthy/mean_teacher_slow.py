"""Mean teacher with few labels: the FP32 average moves by a thousandth a step, and BF16 autocast runs the forwards."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def build():
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
    )


@torch.no_grad()
def follow(teacher, student, decay):
    for a, b in zip(teacher.parameters(), student.parameters()):
        a.lerp_(b, 1 - decay)
    for a, b in zip(teacher.buffers(), student.buffers()):
        a.copy_(b)


def sample(n, centres):
    y = torch.randint(5, (n,))
    return centres[y] + torch.randn(n, 16), y


def main():
    torch.manual_seed(112)
    centres = 1.2 * torch.randn(5, 16)
    student = build()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    labelled = sample(100, centres)
    for step in range(200):
        pick = torch.randint(100, (16,))
        x, y = labelled[0][pick], labelled[1][pick]
        u, _ = sample(48, centres)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = student(torch.cat([x, u + 0.2 * torch.randn_like(u)]))
            with torch.no_grad():
                target = teacher(u + 0.2 * torch.randn_like(u)).softmax(-1)
        weight = min(step / 100, 1.0)
        agree = F.mse_loss(logits[16:].float().softmax(-1), target.float())
        loss = F.cross_entropy(logits[:16].float(), y) + weight * agree
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(teacher, student, min(0.999, 1 - 1 / (step + 1)))
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
