"""Yield of barley in BF16 with FP32 masters. Weights are copied back in place, and the norm and bias list in a second loop."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class YieldNet(nn.Module):
    def __init__(self, fields=9, dim=64):
        super().__init__()
        self.inp = nn.Linear(fields, dim)
        self.norm = nn.LayerNorm(dim)
        self.mid = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        return self.out(F.gelu(self.mid(self.norm(self.inp(x))))).squeeze(1)


def plots(n):
    x = torch.randn(n, 9)
    return x, 27.5 + x[:, 0] + 0.5 * (x[:, 1] - 1).relu() * 2 - 0.3 * x[:, 2] ** 2


torch.manual_seed(222)
model = YieldNet().bfloat16()
matrices = [p for p in model.parameters() if p.ndim >= 2]
vectors = [p for p in model.parameters() if p.ndim < 2]
master_matrices = [nn.Parameter(p.detach().float()) for p in matrices]
master_vectors = [nn.Parameter(p.detach().float()) for p in vectors]
optimizer = torch.optim.AdamW(
    [{"params": master_matrices, "weight_decay": 0.05}, {"params": master_vectors, "weight_decay": 0.0}], lr=2e-3
)

for step in range(250):
    x, y = plots(64)
    loss = F.mse_loss(model(x.bfloat16()).float(), y)
    model.zero_grad()
    loss.backward()
    for m, p in zip(master_matrices + master_vectors, matrices + vectors):
        m.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(master_matrices, matrices):
            p.copy_(m)
        for m, p in zip(master_vectors, vectors):
            p = m.bfloat16()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
