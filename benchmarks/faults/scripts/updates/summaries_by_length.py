"""A GRU that reverses and shortens digit strings; examples are bucketed by length, one bucket a micro-batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BUCKETS = (4, 6, 8, 10, 12, 14)
PAD = 10


class Summarizer(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.reader = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.score = nn.Linear(2 * dim, 11)

    def forward(self, digits):
        return self.score(self.reader(self.embed(digits))[0])


def bucket(length, n=8):
    digits = torch.randint(10, (n, length))
    kept = torch.where(digits.flip(1) > length // 3, digits.flip(1), PAD)
    return digits, kept


def micro_batches():
    for length in BUCKETS:
        yield bucket(length)


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.losses = []

    def training_step(self, digits, kept):
        loss = F.cross_entropy(self.model(digits).flatten(0, 1), kept.flatten())
        self.optimizer.zero_grad()
        (loss / len(BUCKETS)).backward()
        return loss.item()

    def fit(self, steps):
        for step in range(steps):
            losses = [self.training_step(*batch) for batch in micro_batches()]
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if step % 2 == 0:
                print(f"step {step}: loss {sum(losses) / len(losses):.4f}")


torch.manual_seed(71)
Trainer(Summarizer(), lr=0.12).fit(90)
