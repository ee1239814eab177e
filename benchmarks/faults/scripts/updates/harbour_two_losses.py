"""Ships from radar: what it is and how fast it goes, one trunk, two losses that are back-propagated one after the other."""

import torch
import torch.nn.functional as F
from torch import nn


class RadarNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv1d(2, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU()
        )
        self.kind = nn.Linear(width, 5)
        self.speed = nn.Linear(width, 1)

    def forward(self, echo):
        h = self.trunk(echo).mean(-1)
        return self.kind(h), self.speed(h).squeeze(-1)


def echoes(n):
    t = torch.linspace(0, 1, 32)
    kind, knots = torch.randint(5, (n,)), 0.2 + torch.rand(n)
    phase = 6 * torch.rand(n, 1)
    real = torch.cos(40 * knots[:, None] * t + phase) * (0.4 + 0.3 * kind[:, None])
    imag = torch.sin(12 * (1 + kind[:, None]) * t + phase)
    return torch.stack([real, imag], 1) + 0.1 * torch.randn(n, 2, 32), kind, knots


torch.manual_seed(66)
model = RadarNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(160):
    echo, kind, knots = echoes(48)
    logits, speed = model(echo)
    kind_loss, speed_loss = F.cross_entropy(logits, kind), F.mse_loss(speed, knots)

    optimizer.zero_grad()
    kind_loss.backward(retain_graph=True)
    optimizer.zero_grad()
    speed_loss.backward()
    optimizer.step()
    if step % 8 == 7:
        print(f"step {step + 1}: loss {kind_loss.item() + speed_loss.item():.4f}")
