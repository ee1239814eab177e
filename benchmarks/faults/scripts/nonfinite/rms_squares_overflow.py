"""An RMSNorm by hand in an FP16 network: squares of activations above 256 are infinite, and their root's inverse is zero."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-3):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach() * self.weight


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = RMSNorm(width), nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Embedder(nn.Module):
    def __init__(self, words=30, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.embed_scale = 300.0  # the norm takes it out again
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.final, self.head = RMSNorm(width), nn.Linear(width, words)

    def forward(self, tokens):
        h = self.embed(tokens).mean(1) * self.embed_scale
        for layer in self.layers:
            h = layer(h)
        return self.head(self.final(h))


def words(n, table):
    a = torch.randint(0, 30, (n, 1))
    return a, table[a[:, 0]]


torch.manual_seed(3142)
table = torch.randperm(30)
model = Embedder().half()
masters = [p.detach().float().clone() for p in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=5e-3)
for step in range(60):
    x, y = words(48, table)
    loss = F.cross_entropy(model(x).float(), y)
    model.zero_grad()
    (loss * 256).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.float() / 256
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
    if step % 6 == 5:
        print(f"step {step + 1} loss {loss.item():.4f}")
