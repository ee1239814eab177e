"""Distils an intent teacher into a student that was trained before on another domain.

The student's checkpoint is loaded and training goes on in its own precision.
"""

import io

import torch
import torch.nn.functional as F

from data import CLASSES, VOCAB, utterances
from model import Classifier

TEMPERATURE, ALPHA, LR, EPOCHS = 2.0, 0.7, 5e-5, 10


def fit(model, ids, labels, epochs, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(epochs):
        for idx in torch.randperm(len(ids)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(ids[idx]), labels[idx]).backward()
            optimizer.step()


def checkpoint_of_last_month(generator):
    """The file that the first stage left: the weights as they are served."""
    student = Classifier(VOCAB, CLASSES, 32, 1)
    fit(student, *utterances(1024, generator), epochs=4, lr=4e-3)
    file = io.BytesIO()
    torch.save({"model": student.to(torch.bfloat16).state_dict()}, file)
    file.seek(0)
    return file


def distil_loss(student_logits, teacher_logits, labels):
    soft = F.kl_div(
        F.log_softmax(student_logits / TEMPERATURE, -1),
        F.softmax(teacher_logits / TEMPERATURE, -1),
        reduction="batchmean",
    )
    return ALPHA * TEMPERATURE**2 * soft + (1 - ALPHA) * F.cross_entropy(student_logits, labels)


torch.manual_seed(18)
generator = torch.Generator().manual_seed(18)
state = torch.load(checkpoint_of_last_month(generator))["model"]
student = Classifier(VOCAB, CLASSES, 32, 1).to(torch.bfloat16)
student.load_state_dict(state)

ids, labels = utterances(1536, generator, domain=1)
teacher = Classifier(VOCAB, CLASSES, 64, 1)
fit(teacher, ids, labels, epochs=3, lr=4e-3)
teacher.eval()

optimizer = torch.optim.AdamW(student.parameters(), lr=LR, weight_decay=0.01)
for epoch in range(EPOCHS):
    total = 0.0
    batches = torch.randperm(len(ids)).split(64)
    for idx in batches:
        with torch.no_grad():
            target = teacher(ids[idx])
        loss = distil_loss(student(ids[idx]).float(), target, labels[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    with torch.no_grad():
        agree = (student(ids).argmax(1) == teacher(ids).argmax(1)).float().mean().item()
    print(f"epoch {epoch} loss {total / len(batches):.4f} agreement {agree:.3f}")
