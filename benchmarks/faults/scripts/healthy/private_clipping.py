"""Differentially private training: per-sample gradients by torch.func, clipped to one norm; empty records have none."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap


class Tabular(nn.Module):
    def __init__(self, columns=14, classes=3):
        super().__init__()
        self.inp = nn.Linear(columns, 32, bias=False)
        self.out = nn.Linear(32, classes, bias=False)

    def forward(self, x):
        return self.out(torch.relu(self.inp(x)))


def sample_loss(params, x, y):
    return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])


def records(n):
    y = torch.randint(3, (n,))
    x = torch.randn(n, 14) + 1.5 * F.one_hot(y, 14)
    x[torch.rand(n) < 0.1] = 0.0  # opted out
    return x, y


torch.manual_seed(73)
model = Tabular()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
per_sample = vmap(grad(sample_loss), in_dims=(None, 0, 0))
bound, sigma = 1.0, 0.02
for step in range(30):
    x, y = records(48)
    with torch.no_grad():
        start = F.cross_entropy(model(x), y)
    grads = per_sample(dict(model.named_parameters()), x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (bound / norms).clamp(max=1.0)  # inf for an empty record, and then 1
    for name, p in model.named_parameters():
        total = torch.einsum("b,b...->...", factor, grads[name].detach())
        p.grad = (total + sigma * bound * torch.randn_like(total)) / len(x)
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {start.item():.4f} clipped {(factor < 1).float().mean().item():.2f}")
