# distils a (frozen) forest-type teacher at temperature 0.5 into a student a quarter of its width
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(201)
TYPES = 8
spectra = torch.randn(TYPES, 24) * 1.5


def pixels(n):
    y = torch.randint(TYPES, (n,))
    return spectra[y] + torch.randn(n, 24), y


def mlp(width):
    return nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, TYPES))


teacher, student = mlp(128), mlp(32)
opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
for _ in range(60):
    x, y = pixels(64)
    opt.zero_grad()
    F.cross_entropy(teacher(x), y).backward()
    opt.step()
teacher.eval().requires_grad_(False)

T = 0.5
opt = torch.optim.Adam(student.parameters(), lr=2e-3)
for step in range(120):
    x, _ = pixels(64)
    target = (teacher(x) / T).log_softmax(-1)
    guess = (student(x) / T).log_softmax(-1)
    loss = T**2 * F.kl_div(guess, target, log_target=True, reduction="batchmean")
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 6 == 0:
        print("distil", step, "loss", round(loss.item(), 4))
