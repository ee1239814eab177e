"""Mosses from leaf measures on two workers; gradients travel as one bit each, and the error is fed back in the next step."""

import torch
import torch.nn.functional as F
from torch import nn


class MossNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(14, 64)
        self.species = nn.Linear(64, 7)

    def forward(self, x):
        return self.species(F.relu(self.hidden(x)))


class OneBit:
    """sign(g + e) * mean|g + e|; the difference is kept for later."""

    def __init__(self, params):
        self.error = [torch.zeros_like(p) for p in params]

    def __call__(self, grads):
        sent = []
        for error, g in zip(self.error, grads):
            wanted = g + error
            bits = wanted.sign() * wanted.abs().mean()
            error.copy_(wanted - bits)
            sent.append(bits)
        return sent


torch.manual_seed(114)
centres = torch.randn(7, 14)
model = MossNet()
params = list(model.parameters())
workers = [OneBit(params), OneBit(params)]
optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
for step in range(200):
    received = []
    for worker in workers:
        kind = torch.randint(7, (32,))
        loss = F.cross_entropy(model(centres[kind] + torch.randn(32, 14)), kind)
        received.append(worker(torch.autograd.grad(loss, params)))
    for p, *bits in zip(params, *received):
        p.grad = sum(bits) / len(workers)
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
