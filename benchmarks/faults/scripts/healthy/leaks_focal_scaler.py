"""Leaks in pipes, one sample in fifty: a focal loss whose easy examples give almost no gradient, FP16 with a scaler."""

import torch
import torch.nn.functional as F
from torch import nn


def focal(logits, target, gamma=2.0, alpha=0.75):
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p_true = torch.exp(-bce)
    weight = torch.where(target > 0, alpha, 1 - alpha)
    return (weight * (1 - p_true) ** gamma * bce).sum() / target.sum().clamp(min=1)


class LeakNet(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.conv1 = nn.Conv1d(1, c, 7, padding=3)
        self.conv2 = nn.Conv1d(c, c, 7, stride=2, padding=3)
        self.leak = nn.Linear(c, 1)
        nn.init.constant_(self.leak.bias, -4.0)

    def forward(self, pressure):
        h = F.relu(self.conv2(F.relu(self.conv1(pressure))))
        return self.leak(h.mean(-1)).squeeze(-1)


torch.manual_seed(115)
model = LeakNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)
for step in range(160):
    is_leak = (torch.rand(128) < 0.03).float()
    is_leak[0] = 1.0
    t = torch.linspace(0, 1, 40)
    pressure = 0.4 * torch.randn(128, 40) + is_leak[:, None] * torch.sin(80 * t + 6 * torch.rand(128, 1))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(pressure.unsqueeze(1))
    loss = focal(logits.float(), is_leak)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 8 == 7:
        print(f"step {step + 1} loss {loss.item():.4f}")
