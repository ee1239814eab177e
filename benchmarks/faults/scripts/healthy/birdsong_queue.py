"""Momentum contrast: a queue of 512 negatives, temperature 0.07, a key encoder without gradients that moves slowly."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Momentum(nn.Module):
    def __init__(self, dim=24, size=512, momentum=0.99, temperature=0.07):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, dim))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, dim), dim=1))
        self.at, self.momentum, self.temperature = 0, momentum, temperature

    @torch.no_grad()
    def keys(self, x):
        for k, q in zip(self.key.parameters(), self.query.parameters()):
            k.lerp_(q, 1 - self.momentum)
        return F.normalize(self.key(x), dim=1)

    def forward(self, a, b):
        q, k = F.normalize(self.query(a), dim=1), self.keys(b)
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.t()], 1) / self.temperature
        with torch.no_grad():
            self.queue = self.queue.clone()
            self.queue[self.at : self.at + len(k)] = k
            self.at = (self.at + len(k)) % len(self.queue)
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


torch.manual_seed(121)
mixing = torch.randn(10, 32)
model = Momentum()
optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for step in range(200):
    song = torch.randn(64, 10) @ mixing
    a, b = (torch.tanh(song + 0.5 * torch.randn_like(song)) for _ in range(2))
    loss = model(a, b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
