"""Populations of districts, as counts: Poisson regression with rates of up to a million, and offsets by area."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1871)


def districts(n):
    x = torch.randn(n, 5)
    area = 10 ** (1 + 3 * torch.rand(n))
    rate = torch.exp(2 + 0.8 * x[:, 0] - 0.6 * x[:, 1] * x[:, 2]).clamp(max=300)
    return x, area.log(), torch.poisson(area * rate)


net = nn.Sequential(nn.Linear(5, 48), nn.GELU(), nn.Linear(48, 1))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(200):
    x, log_area, count = districts(128)
    log_rate = net(x).squeeze(1) + log_area
    loss = F.poisson_nll_loss(log_rate, count, log_input=True, full=True)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 3:
        print(f"step {step} loss {loss.item():.1f}")
