"""Noam schedule in a LambdaLR: after the warm-up the lambda returns a factor for a base rate that is not one."""

import torch
import torch.nn as nn
import torch.nn.functional as F

WARMUP, PEAK = 60, 3e-3
AFTER_WARMUP = 1.0


def noam(step):
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return AFTER_WARMUP * (WARMUP / step) ** 0.5


class ConvTagger(nn.Module):
    def __init__(self, vocab=40, dim=32, tags=8):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.conv1 = nn.Conv1d(dim, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, padding=1)
        self.classifier = nn.Linear(dim, tags)

    def forward(self, ids):
        h = self.embedding(ids).transpose(1, 2)
        h = h + F.relu(self.conv1(h))
        h = h + F.relu(self.conv2(h))
        return self.classifier(h.transpose(1, 2))


torch.manual_seed(2143)
rule = torch.randint(8, (40,))
model = ConvTagger()
# the lambda is meant to give the rate itself, so the base rate is one
optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, noam)
for step in range(140):
    ids = torch.randint(40, (32, 12))
    tags = (rule[ids] + rule[ids.roll(1, 1)]) % 8
    loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 4 == 0:
        print(f"step {step} lr {scheduler.get_last_lr()[0]:.2e} loss {loss.item():.4f}")
