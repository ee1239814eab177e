"""Bee counts at hive gates. FP16 with a scaler that grows every 15 steps and therefore falls now and then."""

import torch
from torch import nn

torch.manual_seed(211)


class Hive(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(2, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 16, 5, padding=2), nn.ReLU())
        self.rate = nn.Linear(16, 1)

    def forward(self, x):
        return self.rate(self.conv(x).mean(-1)).squeeze(1)


def gates(n):
    rate = torch.rand(n) * 2
    flow = torch.poisson(rate.view(-1, 1, 1).expand(-1, 2, 40))
    return flow, torch.poisson(20 * rate)


net = Hive()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=15)
for step in range(150):
    x, bees = gates(64)
    with torch.autocast("cpu", dtype=torch.float16):
        log_rate = net(x)
    loss = nn.functional.poisson_nll_loss(log_rate.float(), bees, full=True)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
