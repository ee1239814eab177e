"""Pairwise ranking; half-precision weights, FP32 copies, and a loss scale of 2048 that is taken off in FP32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(46)
DIM = 20
taste = torch.randn(DIM)


def pairs(n):
    a, b = torch.randn(2, n, DIM)
    score = lambda x: x @ taste + (x[:, 0] * x[:, 1])  # noqa: E731
    return a, b, (score(a) > score(b)).float()


model = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).half()
master = [p.detach().float().clone() for p in model.parameters()]
optimizer = torch.optim.SGD(master, lr=0.2, momentum=0.9)
SCALE = 2048.0
for step in range(120):
    a, b, first = pairs(64)
    margin = (model(a.half()) - model(b.half())).float().squeeze(1)
    loss = F.binary_cross_entropy_with_logits(margin, first)
    model.zero_grad()
    (loss * SCALE).backward()
    for m, p in zip(master, model.parameters()):
        m.grad = p.grad.float() / SCALE
    nn.utils.clip_grad_norm_(master, 1.0)
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters()):
            p.copy_(m)
    if step % 3 == 2:
        print(f"step {step} loss {loss.item():.4f}")
