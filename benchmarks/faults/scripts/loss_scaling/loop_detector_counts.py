"""Traffic counts of loop detectors: a sequence-to-one model under FP16 autocast."""

import torch
import torch.nn as nn

torch.manual_seed(8)
SENSORS, WINDOW = 12, 24
coupling = torch.softmax(2 * torch.randn(SENSORS, SENSORS), -1)
phase = torch.rand(SENSORS) * 6.28


def counts(batch):
    t = torch.rand(batch, 1, 1) * 24 + torch.arange(WINDOW + 1).view(1, -1, 1) / 4
    base = 40 + 30 * torch.sin(6.28 * t / 24 + phase)
    flow = base @ coupling.T + 2 * torch.randn(batch, WINDOW + 1, SENSORS)
    return flow[:, :-1], flow[:, -1]


class Forecaster(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.embed = nn.Linear(SENSORS, d)
        self.mix = nn.Sequential(nn.Linear(d * WINDOW, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = nn.Linear(64, SENSORS)

    def forward(self, x):
        h = torch.tanh(self.embed(x / 40 - 1))
        return self.head(self.mix(h.flatten(1)))


net = Forecaster()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_factor=2.0, backoff_factor=0.5, growth_interval=1)
for i in range(140):
    x, y = counts(64)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
        loss = ((out.float() - (y / 40 - 1)) ** 2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if i % 2:
        print(f"{i:4d} loss={loss.item():.5f} scale={scaler.get_scale():.0f}")
