"""Depth of gullies after a storm: a small network with warm restarts, whose loss jumps when the rate does."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(181)
g = torch.Generator().manual_seed(182)


class GullyNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.inp = nn.Linear(14, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(3))
        self.depth = nn.Linear(width, 1)

    def forward(self, x):
        x = F.silu(self.inp(x))
        for norm, layer in zip(self.norms, self.hidden):
            x = x + F.silu(norm(layer(x)))
        return self.depth(x).squeeze(1)


def slopes(n):
    x = torch.randn(n, 14, generator=g)
    flow = F.softplus(x[:, 0] + x[:, 1] * x[:, 2])
    depth = flow * torch.sigmoid(2 * x[:, 3]) + 0.5 * (x[:, 4] * x[:, 5]).tanh()
    return x, depth + 0.1 * torch.randn(n, generator=g)


net = GullyNet()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=60, T_mult=2, eta_min=1e-4)
for step in range(420):
    x, depth = slopes(128)
    loss = F.mse_loss(net(x), depth)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()
    restarts.step()
    if step % 10 == 0:
        print(f"step {step} rate {optimizer.param_groups[0]['lr']:.4f} loss {loss.item():.4f}")
