"""Adapts a frozen ticket router to a new department with low-rank matrices. The base is stored in bfloat16."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 16.0):
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        frozen = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return frozen + self.scale * F.linear(F.linear(x, self.a), self.b)


class Router(nn.Module):
    def __init__(self, words=120, d=48, queues=6):
        super().__init__()
        self.words = nn.EmbeddingBag(words, d, mode="mean")
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(4))
        self.queue = nn.Linear(d, queues)

    def forward(self, ids):
        x = 3 * self.words(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.queue(x)


def tickets(topic, n=64):
    y = torch.randint(topic.shape[0], (n,))
    return torch.multinomial(topic[y], 14, replacement=True), y


def train(model, topic, steps, lr, log=False):
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    for step in range(steps):
        ids, y = tickets(topic)
        loss = F.cross_entropy(model(ids), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if log and step % 8 == 0:
            print(f"adapt {step} loss {loss.item():.4f}")


torch.manual_seed(33)
model = Router()
train(model, torch.softmax(1.5 * torch.randn(6, 120), 1), 80, 3e-3)
for p in model.parameters():
    p.requires_grad_(False)
model.layers = nn.ModuleList(LoRALinear(layer) for layer in model.layers)
train(model, torch.softmax(1.5 * torch.randn(6, 120), 1), 160, 5e-3, log=True)
