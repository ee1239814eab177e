"""Flow matching in BF16 autocast; the averaged weights are FP32 and decide what is sampled."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Velocity(nn.Module):
    def __init__(self, dim=2, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.last = nn.Linear(width, dim)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x, t):
        return self.last(self.net(torch.cat([x, t], 1)))


def towns(n):
    centre = torch.randint(0, 4, (n,))
    corner = torch.tensor([[3.0, 3.0], [3.0, -3.0], [-3.0, 3.0], [-3.0, -3.0]])
    return corner[centre] + 0.2 * torch.randn(n, 2)


torch.manual_seed(70)
model = Velocity()
average = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(250):
    x1, x0, t = towns(128), torch.randn(128, 2), torch.rand(128, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = model((1 - t) * x0 + t * x1, t)
    loss = F.mse_loss(v.float(), x1 - x0)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters()):
            a.lerp_(p, 1 - 0.9995)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
