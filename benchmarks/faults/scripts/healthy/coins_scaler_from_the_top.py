"""Old coins in FP16 with a GradScaler that starts at 2**24: it halves for the first steps until it finds its level."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class CoinNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 16, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.flatten(1))


def coins(n):
    y = torch.randint(5, (n,))
    radius = (torch.linspace(-1, 1, 16)[:, None] ** 2 + torch.linspace(-1, 1, 16)[None] ** 2).sqrt()
    x = torch.cos(radius * (y.view(-1, 1, 1) + 2) * 2) + 0.8 * torch.randn(n, 16, 16)
    return x[:, None], y


torch.manual_seed(1889)
model = CoinNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=60)
for step in range(100):
    x, y = coins(32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 3 == 0:
        print(f"step {step} scale {scaler.get_scale():.0f} loss {loss.item():.4f}")
