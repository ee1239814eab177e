"""A hand-written Lion with strong decoupled decay: the sign of a moving average, no second moment."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(85)


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=3e-4, betas=(0.9, 0.99), weight_decay=1.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(m.lerp(p.grad, 1 - b1).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)


def bars(n):
    k = torch.randint(8, (n,))
    x = 0.7 * torch.randn(n, 8, 8)
    rows = k < 4
    x[rows, 2 * (k[rows] % 4)] += 1.5
    x[~rows, :, 2 * (k[~rows] % 4)] += 1.5
    return x.unsqueeze(1), k


net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.SiLU()),
    *(nn.Flatten(), nn.Linear(256, 8)),
)
opt = Lion(net.parameters(), lr=1e-3)
for step in range(120):
    x, k = bars(48)
    loss = F.cross_entropy(net(x), k)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 2:
        print(f"step {step} loss {loss.item():.4f}")
