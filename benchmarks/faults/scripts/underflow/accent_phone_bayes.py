"""Accent labels from phone strings: a mixture of class-conditional products of probabilities, trained end to end."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(23)
PHONES, LENGTH, ACCENTS = 30, 12, 5
truth = torch.softmax(torch.randn(ACCENTS, PHONES), -1)


def strings(n):
    accent = torch.randint(ACCENTS, (n,))
    return torch.multinomial(truth[accent], LENGTH, replacement=True), accent


class NaiveBayes(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.phone, self.accent = nn.Embedding(PHONES, d), nn.Linear(d, ACCENTS)

    def emission(self):
        return self.accent(self.phone.weight).softmax(0)

    def forward(self, ids):
        p = self.emission()[ids]
        joint = p.prod(1)
        return joint / (joint.sum(-1, keepdim=True) + 1e-10)


model = NaiveBayes()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(120):
    ids, accent = strings(64)
    posterior = model(ids)
    loss = F.nll_loss((posterior + 1e-6).log(), accent)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 1:
        print(f"step {step} loss {loss.item():.4f}")
