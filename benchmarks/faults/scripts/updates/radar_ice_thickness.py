"""Ice thickness from radar traces: a small 1-D residual tower on echograms."""

import math

import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(3)
SAMPLES, CH = 64, 24


class Res(nn.Module):
    def __init__(self, ch, k=5):
        super().__init__()
        self.a = nn.Conv1d(ch, ch, k, padding=k // 2)
        self.b = nn.Conv1d(ch, ch, k, padding=k // 2)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x)))


class Context(nn.Module):
    """Looks at the whole trace at once; most of the parameters are here."""

    def __init__(self, n, hidden):
        super().__init__()
        self.up = nn.Linear(n, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.down = nn.Linear(hidden, n)

    def forward(self, x):
        return self.down(F.gelu(self.mid(F.gelu(self.up(x)))))


class ThicknessNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, CH, 7, padding=3)
        self.lower = nn.ModuleList([Res(CH) for _ in range(2)])
        self.squeeze = nn.Conv1d(CH, 4, 1)
        self.context = Context(4 * SAMPLES // 4, 256).to(torch.bfloat16)
        self.upper = nn.Sequential(nn.Linear(SAMPLES, 48), nn.GELU(), nn.Linear(48, 1))

    def forward(self, trace):
        x = self.stem(trace[:, None])
        for block in self.lower:
            x = block(x)
        x = F.avg_pool1d(self.squeeze(x), 4).flatten(1)
        x = self.context(x.to(self.context.up.weight.dtype)).float()
        return self.upper(x).squeeze(1)


def traces(n):
    surface = 6 + 4 * torch.rand(n, 1)
    bed = surface + 8 + 40 * torch.rand(n, 1)
    t = torch.arange(SAMPLES)[None]
    echo = torch.exp(-((t - surface) ** 2) / 3) + 0.7 * torch.exp(-((t - bed) ** 2) / 6)
    return echo + 0.08 * torch.randn(n, SAMPLES), ((bed - surface) / 10).squeeze(1)


net = ThicknessNet()
optimizer = torch.optim.AdamW(
    [
        {"params": [*net.stem.parameters(), *net.lower.parameters(), *net.squeeze.parameters()]},
        {"params": net.context.parameters()},
        {"params": net.upper.parameters()},
    ],
    lr=1e-4,
    weight_decay=0.0,
)
STEPS = 220
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 1e-4 * (0.2 + 0.8 * math.cos(math.pi * step / STEPS / 2))
    x, y = traces(48)
    loss = F.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"{step:4d} loss {loss.item():.4f}")
