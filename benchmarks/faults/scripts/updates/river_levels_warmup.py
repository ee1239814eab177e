"""Forecasts river levels with a temporal convolution network; the rate warms up first."""

import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = {"lr": 3e-3, "warmup_steps": 10, "steps": 240, "batch": 32, "history": 64}


class CausalConv(nn.Module):
    def __init__(self, inp, out, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(inp, out, 3, dilation=dilation)
        self.skip = nn.Conv1d(inp, out, 1)

    def forward(self, x):
        return F.relu(self.conv(F.pad(x, (self.pad, 0)))) + self.skip(x)


class LevelNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.blocks = nn.Sequential(CausalConv(2, width, 1), CausalConv(width, width, 2), CausalConv(width, width, 4))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.blocks(x)[:, :, -1])


def rivers(n, history):
    rain = (torch.rand(n, history + 3) < 0.15).float() * torch.rand(n, history + 3) * 3
    level = torch.zeros(n, history + 3)
    for t in range(1, history + 3):
        level[:, t] = 0.85 * level[:, t - 1] + 0.3 * rain[:, t - 1]
    x = torch.stack([rain[:, :history], level[:, :history]], 1)
    return x, level[:, history:]


def warmup(step):
    return (step + 1) / CONFIG["warmup_steps"]


torch.manual_seed(79)
model = LevelNet()
optimizer = torch.optim.Adam(model.parameters(), lr=CONFIG["lr"])
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
for step in range(CONFIG["steps"]):
    x, y = rivers(CONFIG["batch"], CONFIG["history"])
    loss = F.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 5 == 0:
        print(f"step {step:3d} lr {schedule.get_last_lr()[0]:.5f} loss {loss.item():.5f}")
