"""Grammage of paper from light transmission: a BF16 network with FP32 copies of its weights, rate down to 1e-6."""

import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1450)
N, STEPS = 16, 520
w = torch.randn(N)


def sheets(n):
    x = torch.randn(n, N)
    return x, torch.tanh(x @ w / 3) + 0.4 * x[:, 1] * x[:, 2] + 0.1 * torch.randn(n)


class Copies:
    """Adam on FP32 copies; the network gets the rounded result."""

    def __init__(self, model, lr):
        self.pairs = [(p, p.detach().float().clone().requires_grad_()) for p in model.parameters()]
        self.adam = torch.optim.AdamW([c for _, c in self.pairs], lr=lr)

    def step(self, lr):
        for p, c in self.pairs:
            c.grad, p.grad = p.grad.float(), None
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        with torch.no_grad():
            for p, c in self.pairs:
                p.copy_(c)


def network(d=40):
    body = []
    for _ in range(3):
        body += [nn.Linear(d, d), nn.LayerNorm(d), nn.GELU()]
    return nn.Sequential(nn.Linear(N, d), *body, nn.Linear(d, 1))


model = network().to(torch.bfloat16)
copies = Copies(model, 3e-3)
for step in range(STEPS):
    x, grammage = sheets(96)
    loss = F.mse_loss(model(x.to(torch.bfloat16)).squeeze(1).float(), grammage)
    loss.backward()
    copies.step(1e-6 + 0.5 * 3e-3 * (1 + math.cos(math.pi * step / STEPS)))
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.4f}")
