"""Gearbox damage in wind turbines from vibration windows, mixed precision."""

import torch
from torch import nn

torch.manual_seed(0)
CLASSES, WIDTH, LENGTH = 5, 32, 24


class Turbine(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, WIDTH)
        self.w = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        h = torch.zeros(len(x), WIDTH)
        u = self.inp(x)
        for t in range(x.shape[1]):
            h = torch.tanh(u[:, t] + self.w(h))
        return self.out(self.mix(h))


def window(n):
    y = torch.randint(CLASSES, (n,))
    t = torch.arange(LENGTH)[None, :, None] * (0.15 + 0.2 * y[:, None, None])
    phase = torch.arange(6)[None, None] * 0.7
    return torch.sin(t + phase) + 2.0 * torch.randn(n, LENGTH, 6), y


net = Turbine()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
criterion = nn.CrossEntropyLoss()

for it in range(160):
    x, y = window(32)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(net(x), y)
    scaler.scale(loss).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
    scaler.step(opt)
    scaler.update()
    if it % 8 == 0:
        print(f"iter {it} loss {loss.item():.4f} grad {norm.item():.3g}")
