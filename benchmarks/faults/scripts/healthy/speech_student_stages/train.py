"""FitNets for keywords: a teacher, then hints for the student's body, then distillation into its three exits."""

import torch
import torch.nn.functional as F

from nets import Student, Teacher

torch.manual_seed(54)
WORDS = 8
centres = torch.randn(WORDS, 2, 20)


def clips(n):
    y = torch.randint(WORDS, (n,))
    return centres[y, torch.randint(2, (n,))] + 0.8 * torch.randn(n, 20), y


teacher, student = Teacher(), Student()
optimizer = torch.optim.Adam(teacher.parameters(), lr=2e-3)
for _ in range(150):
    x, y = clips(48)
    optimizer.zero_grad()
    F.cross_entropy(teacher(x)[0], y).backward()
    optimizer.step()
teacher.requires_grad_(False).eval()

optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
HINTS, STEPS, TAU = 120, 420, 3.0
for step in range(STEPS):
    x, y = clips(48)
    with torch.no_grad():
        soft, hint = teacher(x)
    answers, guess = student(x)
    if step < HINTS:
        objective = F.mse_loss(guess, hint)
    else:
        soft = (soft / TAU).softmax(-1)
        objective = sum(
            w * TAU**2 * F.kl_div((a / TAU).log_softmax(-1), soft, reduction="batchmean")
            for w, a in zip((0.2, 0.3, 0.5), answers)
        )
    optimizer.zero_grad()
    objective.backward()
    optimizer.step()
    if step % 7 == 0:
        print(f"step {step} loss {F.cross_entropy(answers[-1], y).item():.4f}")
