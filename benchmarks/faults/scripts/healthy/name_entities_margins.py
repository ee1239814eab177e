"""Naive Bayes scores as inputs: logits of several hundred, and nothing wrong with that."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ScoreCombiner(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(classes) * 0.2)
        self.mix = nn.Linear(classes, classes)

    def forward(self, log_likelihood):
        return self.weight * log_likelihood + self.mix(log_likelihood / 100)


torch.manual_seed(100)
tables = torch.log_softmax(0.25 * torch.randn(8, 50), -1)
wrong = torch.log_softmax(tables + 0.35 * torch.randn(8, 50), -1)
model = ScoreCombiner()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(250):
    y = torch.randint(0, 8, (64,))
    words = torch.multinomial(tables[y].exp(), 300, replacement=True)
    counts = F.one_hot(words, 50).sum(1).float()
    loss = F.cross_entropy(model(counts @ wrong.t()), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
