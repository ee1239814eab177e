"""Poses under BF16 autocast; the EMA is in FP32 and its decay ramps up to 0.9999, so that late updates are tiny."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(612)


class PoseNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(34, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.joints = nn.Linear(width, 12)

    def forward(self, x):
        return self.joints(self.backbone(x))


net = PoseNet()
ema = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
camera = torch.randn(34, 12) / 6
for step in range(300):
    x = torch.randn(64, 34)
    target = torch.sin(x @ camera)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = net(x)
    loss = F.mse_loss(pred.float(), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    decay = min(0.9999, (1 + step) / (10 + step))
    with torch.no_grad():
        for e, p in zip(ema.parameters(), net.parameters()):
            e.lerp_(p, 1 - decay)
        if step % 15 == 14:
            print(f"step {step + 1} train {loss.item():.4f} EMA loss {F.mse_loss(ema(x), target).item():.4f}")
