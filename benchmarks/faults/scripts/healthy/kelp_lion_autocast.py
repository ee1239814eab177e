"""Kelp cover from drone stripes with Lion (updates are signs), FP32 weights, BF16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (b1 * m + (1 - b1) * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class KelpNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.inp = nn.Conv2d(3, c, 3, padding=1)
        self.mid = nn.Conv2d(c, c, 3, padding=1, groups=4)
        self.norm = nn.GroupNorm(4, c)
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, stripe):
        return self.out(F.relu(self.norm(self.mid(F.relu(self.inp(stripe)))))).squeeze(1)


def stripes(n):
    kelp = F.avg_pool2d(torch.randn(n, 1, 14, 14), 3, 1) > 0.15
    colour = torch.tensor([0.3, 0.8, -0.5])[:, None, None] * kelp + 0.4 * torch.randn(n, 3, 12, 12)
    return colour, kelp.squeeze(1).float()


torch.manual_seed(109)
model = KelpNet()
optimizer = Lion(model.parameters(), lr=6e-4, weight_decay=0.05)
for step in range(180):
    colour, kelp = stripes(12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(colour)
    loss = F.binary_cross_entropy_with_logits(logits.float(), kelp)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
