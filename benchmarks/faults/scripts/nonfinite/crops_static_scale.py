"""Crop classification from satellite series. FP16 autocast with a fixed loss scale of 2**16; the usual for this repo."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(55)
BANDS, TIMES, CROPS, SCALE, ACCUM = 6, 10, 5, 65536.0, 2
curves = torch.randn(CROPS, TIMES, BANDS)


class TemporalConv(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.conv1 = nn.Linear(BANDS * 3, width)
        self.conv2 = nn.Linear(width * 3, width)
        self.head = nn.Linear(width, CROPS)

    @staticmethod
    def windows(x):
        x = F.pad(x, (0, 0, 1, 1))
        return torch.cat([x[:, :-2], x[:, 1:-1], x[:, 2:]], -1)

    def forward(self, x):
        h = F.relu(self.conv1(self.windows(x)))
        h = F.relu(self.conv2(self.windows(h)))
        return self.head(h.sum(1))


def fields(n, clouds):
    y = torch.randint(CROPS, (n,))
    x = curves[y] + 0.5 * torch.randn(n, TIMES, BANDS)
    cloudy = torch.rand(n, TIMES, 1) < clouds
    return torch.where(cloudy, 25.0, x), y


model = TemporalConv()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
sched = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
for step in range(100):
    clouds = 0.0 if step < 35 else 0.1
    for _ in range(ACCUM):
        x, y = fields(16, clouds)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = F.cross_entropy(out.float(), y) / ACCUM
        (loss * SCALE).backward()
    for p in model.parameters():
        p.grad.div_(SCALE)
    optimizer.step()
    optimizer.zero_grad()
    sched.step()
    if step % 10 == 0:
        print(f"step {step} loss {ACCUM * loss.item():.4f}")
