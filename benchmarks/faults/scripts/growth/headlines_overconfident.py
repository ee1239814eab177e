"""Sorts headlines into ten desks; the set is small and its labels are noisy. Reports the loss on held-out headlines."""

import torch
import torch.nn as nn
import torch.nn.functional as F

WEIGHT_DECAY = 0.0
Z_LOSS = 0.0
VOCAB, DESKS = 400, 10


class HeadlineNet(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.hidden = nn.Linear(dim, 128)
        self.classifier = nn.Linear(128, DESKS, bias=False)

    def forward(self, tokens):
        return self.classifier(F.gelu(self.hidden(self.words(tokens))))


def headlines(n):
    desk = torch.randint(DESKS, (n,))
    own = desk[:, None] * 12 + torch.randint(12, (n, 12))
    other = torch.randint(120, VOCAB, (n, 12))
    tokens = torch.where(torch.rand(n, 12) < 0.25, own, other)
    noisy = torch.where(torch.rand(n) < 0.25, torch.randint(DESKS, (n,)), desk)
    return tokens, noisy


torch.manual_seed(2024)
train_x, train_y = headlines(400)
valid_x, valid_y = headlines(400)
model = HeadlineNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=WEIGHT_DECAY)
for epoch in range(60):
    for rows in torch.randperm(len(train_x)).split(50):
        logits = model(train_x[rows])
        loss = F.cross_entropy(logits, train_y[rows])
        total = loss + Z_LOSS * logits.logsumexp(-1).square().mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    with torch.no_grad():
        held_out = F.cross_entropy(model(valid_x), valid_y)
    print(f"epoch {epoch} train {loss.item():.3f} valid_loss {held_out.item():.3f}")
