"""A frozen network is steered by a side branch through convolutions that start at zero."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def zero_module(module):
    for p in module.parameters():
        nn.init.zeros_(p)
    return module


class Controlled(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.base = nn.ModuleList([nn.Conv2d(1, c, 3, 1, 1), nn.Conv2d(c, c, 3, 1, 1), nn.Conv2d(c, 1, 3, 1, 1)])
        self.base.requires_grad_(False)
        self.hint = nn.Conv2d(1, c, 3, 1, 1)
        self.copy = nn.Conv2d(c, c, 3, 1, 1)
        self.zero_in, self.zero_out = (zero_module(nn.Conv2d(c, c, 1)) for _ in range(2))

    def forward(self, x, hint):
        h = F.silu(self.base[0](x))
        control = self.zero_in(F.silu(self.hint(hint)))
        control = self.zero_out(F.silu(self.copy(h + control)))
        return self.base[2](F.silu(self.base[1](h) + control))


torch.manual_seed(2165)
model = Controlled()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
for step in range(250):
    hint = F.avg_pool2d(torch.randn(16, 1, 12, 12), 3, 1, 1)
    x = 0.3 * torch.randn(16, 1, 12, 12)
    loss = F.mse_loss(model(x, hint), hint)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.5f}")
