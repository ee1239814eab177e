"""A small network learns quilt blocks from a larger one, which is trained first and then only read."""

import torch
import torch.nn.functional as F
from data import blocks, make_patterns
from models import Average, QuiltNet


def train_teacher(teacher, draw, steps=120):
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=4e-3)
    for _ in range(steps):
        image, kind = draw(48)
        optimizer.zero_grad()
        F.cross_entropy(teacher(image), kind).backward()
        optimizer.step()
    return teacher.eval().requires_grad_(False)


def distil_loss(student, teacher, temperature=3.0):
    p, q = (student / temperature).log_softmax(1), (teacher / temperature).log_softmax(1)
    return temperature**2 * F.kl_div(p, q, reduction="batchmean", log_target=True)


if __name__ == "__main__":
    torch.manual_seed(201)
    g = torch.Generator().manual_seed(202)
    patterns = make_patterns(g)

    def draw(n):
        return blocks(n, g, patterns)

    teacher = train_teacher(QuiltNet(24, 3), draw)
    student = QuiltNet(10, 2)
    average = Average(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.08, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.08, total_steps=200)
    for step in range(200):
        image, kind = draw(48)
        with torch.no_grad():
            told = teacher(image)
        logits = student(image)
        loss = 0.3 * F.cross_entropy(logits, kind) + 0.7 * distil_loss(logits, told)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update(student)
        if step % 8 == 0:
            print(f"step {step} loss {loss.item():.4f}")
