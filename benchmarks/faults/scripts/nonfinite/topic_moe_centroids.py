"""Sparse MoE text tagger. Besides the task loss, experts are kept apart by a loss on the centroids of their tokens."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(8)
DIM, EXPERTS, CLASSES = 24, 8, 16
means = torch.randn(CLASSES, DIM) * 1.5


def tokens(batch=24, length=6):
    y = torch.randint(CLASSES, (batch, length))
    return means[y] + torch.randn(batch, length, DIM), y


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        weight, choice = probs.max(-1)
        return weight, choice


class MoE(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.router = Router()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, hidden) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, DIM) * hidden**-0.5)

    def forward(self, x):
        flat = x.reshape(-1, DIM)
        weight, choice = self.router(flat)
        onehot = F.one_hot(choice, EXPERTS).to(flat.dtype)
        h = torch.einsum("nd,edh->enh", flat, self.up).relu()
        y = torch.einsum("enh,ehd,ne->nd", h, self.down, onehot) * weight.unsqueeze(-1)
        centroids = (onehot.T @ y) / onehot.sum(0).unsqueeze(-1)
        apart = F.cosine_similarity(centroids.unsqueeze(0), centroids.unsqueeze(1), dim=-1)
        return x + y.view_as(x), apart.triu(1).mean()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoE()
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        h, aux = self.moe(self.norm(x))
        return self.head(h), aux


model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for it in range(150):
    x, y = tokens()
    logits, aux = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * aux
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 10 == 0:
        print(f"{it:4d} loss {loss.item():.4f}")
