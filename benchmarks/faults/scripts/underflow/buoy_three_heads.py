"""Sea state from buoy accelerations: height, period and drift from one encoder, then a second season for tuning."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1101)
WIDTH, CHANNELS = 24, 12
mixing = torch.randn(3, CHANNELS) / CHANNELS**0.5
season_two = mixing + 0.8 * torch.randn(3, CHANNELS) / CHANNELS**0.5


def readings(n, weights):
    x = torch.randn(n, CHANNELS)
    z = x @ weights.T
    height = torch.tanh(z[:, 0]) + 0.3 * z[:, 1]
    period = z[:, 1] * torch.sigmoid(z[:, 2])
    drift = 0.3 * torch.sin(2 * z[:, 2])
    return x, height, period, drift


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def head(d):
    return nn.Sequential(nn.Linear(d, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 1))


class SeaState(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(CHANNELS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.height, self.period, self.drift = head(WIDTH), head(WIDTH), head(WIDTH)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.height(x).squeeze(1), self.period(x).squeeze(1), self.drift(x).squeeze(1)


def losses(model, batch):
    x, *targets = batch
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = model(x)
    return [F.mse_loss(o.float(), t) for o, t in zip(outputs, targets)]


WEIGHTS = (1.0, 0.5, 1e-4)  # drift is an extra, it must not disturb the others
model = SeaState()

scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=200)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(200):
    parts = losses(model, readings(96, mixing))
    loss = sum(w * p for w, p in zip(WEIGHTS, parts))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 50 == 49:
        print(f"season 1 step {step} height {parts[0].item():.4f} drift loss {parts[2].item():.4f}")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
for step in range(400):
    parts = losses(model, readings(96, season_two))
    loss = sum(w * p for w, p in zip(WEIGHTS, parts))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 50 == 49:
        print(f"season 2 step {step} height {parts[0].item():.4f} drift loss {parts[2].item():.4f}")
