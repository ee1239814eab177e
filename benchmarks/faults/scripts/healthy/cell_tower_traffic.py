"""Traffic of a cell tower by hour and weather, with torchao's eight-bit AdamW and a schedule that restarts."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchao.optim import AdamW8bit

torch.manual_seed(61)
torch.compiler.set_stance("force_eager")


def hours(n):
    hour, weekend, rain = 24 * torch.rand(n), (torch.rand(n) < 2 / 7).float(), torch.rand(n)
    busy = torch.sin(math.pi * (hour - 7) / 12) * (1 - 0.4 * weekend) + 0.5 * torch.sin(math.pi * hour / 3)
    x = torch.stack([(hour - 12) / 7, weekend, rain], 1)
    return x, busy + 0.3 * rain * weekend + 0.1 * torch.randn(n)


class TrafficNet(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.lift = nn.Linear(3, width)
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.gate = nn.Parameter(torch.zeros(width))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.sin(2 * self.lift(x))
        return self.out(h + self.gate * self.mix(h))[:, 0]


x, y = hours(4096)
model = TrafficNet()
optimizer = AdamW8bit(model.parameters(), lr=3e-3, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=80)
total = 0.0
for step in range(240):
    pick = torch.randint(len(x), (64,))
    with torch.autocast("cpu", torch.bfloat16):
        prediction = model(x[pick])
    loss = F.smooth_l1_loss(prediction.float(), y[pick])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    total += loss.item() / 20
    if step % 20 == 19:
        print(f"step {step + 1} loss {total:.4f}")
        total = 0.0
