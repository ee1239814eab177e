"""States of motors across test benches: domain-adversarial training; the reversal's strength follows the usual ramp."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(16)
STEPS = 400
prototype = 1.5 * torch.randn(4, 12)
bench_shift = torch.randn(12)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None


class DANN(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, d), nn.ReLU())
        self.label = nn.Linear(d, 4)
        self.domain = nn.Sequential(nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, 2))

    def forward(self, x, strength):
        h = self.features(x)
        return self.label(h), self.domain(Reverse.apply(h, strength))


def bench(n, second):
    y = torch.randint(4, (n,))
    return prototype[y] + torch.randn(n, 12) + second * bench_shift, y


model = DANN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(STEPS):
    p = step / STEPS
    strength = 2 / (1 + math.exp(-10 * p)) - 1
    for g in optimizer.param_groups:
        g["lr"] = 0.02 / (1 + 10 * p) ** 0.75
    (xs, ys), (xt, _) = bench(32, 0), bench(32, 1)
    label, domain = model(torch.cat([xs, xt]), strength)
    which = torch.arange(64) // 32
    task = F.cross_entropy(label[:32], ys)
    optimizer.zero_grad()
    (task + F.cross_entropy(domain, which)).backward()
    optimizer.step()
    if step % 8 == 0:
        print(
            f"step {step} strength {strength:.2f} domain {F.cross_entropy(domain, which).item():.3f} task loss {task.item():.4f}"
        )
