"""A SIREN fits an image in FP16 autocast. Gradients are unscaled by hand for a look at their norm, and by the scaler again."""

import math

import torch
from torch import nn


class Sine(nn.Module):
    def __init__(self, n_in, n_out, omega):
        super().__init__()
        self.omega, self.linear = omega, nn.Linear(n_in, n_out)
        bound = 1 / n_in if omega > 20 else math.sqrt(6 / n_in) / omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(self.omega * self.linear(x))


torch.manual_seed(85)
siren = nn.Sequential(Sine(2, 48, 30.0), Sine(48, 48, 10.0), Sine(48, 48, 10.0), nn.Linear(48, 1))
axis = torch.linspace(-1, 1, 24)
grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
picture = torch.sin(9 * grid[:, :1]) * torch.cos(6 * grid[:, 1:] + grid[:, :1] ** 2)

optimizer = torch.optim.SGD(siren.parameters(), lr=1e-3, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
for step in range(60):
    pick = torch.randint(len(grid), (256,))
    with torch.autocast("cpu", dtype=torch.float16):
        value = siren(grid[pick])
    loss = (value.float() - picture[pick]).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    norm = 0.0
    for p in siren.parameters():
        p.grad.div_(scaler.get_scale())
        norm += p.grad.norm().item() ** 2
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.5f} norm {math.sqrt(norm):.3g}")
