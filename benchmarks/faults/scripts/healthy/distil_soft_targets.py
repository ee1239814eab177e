"""Knowledge distillation: a trained, frozen teacher, a small student, temperature 4 and a little of the hard labels."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def network(width):
    return nn.Sequential(
        nn.Linear(20, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def data(n, centres):
    y = torch.randint(10, (n,))
    mode = torch.randint(2, (n,))
    return centres[y, mode] + 0.7 * torch.randn(n, 20), y


def evaluate(model, centres):
    model.eval()
    with torch.no_grad():
        x, y = data(500, centres)
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return accuracy


def main(temperature=4.0, alpha=0.1):
    torch.manual_seed(7027)
    centres = torch.randn(10, 2, 20)
    teacher, student = network(128), network(16)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(60):
        x, y = data(128, centres)
        optimizer.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        optimizer.step()
    print("teacher accuracy", evaluate(teacher, centres))

    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for step in range(100):
        x, y = data(64, centres)
        with torch.no_grad():
            soft = F.log_softmax(teacher(x) / temperature, -1)
        logits = student(x)
        distil = F.kl_div(F.log_softmax(logits / temperature, -1), soft, reduction="batchmean", log_target=True)
        loss = (1 - alpha) * temperature**2 * distil + alpha * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 5 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")
    print("student accuracy", evaluate(student, centres))


main()
