"""Aphids per leaf: trained for a night, saved to a small checkpoint, resumed the next day."""

import io

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(23)
N, D = 18, 40
w = torch.randn(3, N)


def leaves(n):
    x = torch.randn(n, N)
    z = x @ w.T / 4
    return x, torch.poisson(torch.exp(1.0 + 0.8 * torch.tanh(z[:, 0]) + z[:, 1] * torch.sigmoid(z[:, 2])))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(N, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.rate = nn.Linear(D, 1)

    def forward(self, x):
        x = self.inp(x)
        for norm, layer in zip(self.norms, self.layers):
            x = x + F.gelu(layer(norm(x)))
        return self.rate(x).squeeze(1)


def make():
    model = Counter()
    return model, torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.999))


def train(model, optimizer, first, last):
    for step in range(first, last):
        x, count = leaves(128)
        loss = F.poisson_nll_loss(model(x), count)
        optimizer.zero_grad()
        (loss / 100).backward()  # the unit of the other tasks of this project
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step} loss {loss.item():.4f}")


def compact(tree):
    if isinstance(tree, dict):
        return {k: compact(v) for k, v in tree.items()}
    return tree.half() if isinstance(tree, torch.Tensor) and tree.dim() else tree


model, optimizer = make()
train(model, optimizer, 0, 300)
disk = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": compact(optimizer.state_dict())}, disk)

disk.seek(0)
saved = torch.load(disk)
model, optimizer = make()
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
restored = torch.cat([s["exp_avg_sq"].flatten() for s in optimizer.state.values()]).clone()
train(model, optimizer, 300, 400)
