"""Inverse kinematics from raw sensors, which are normalised by running sums; to save memory these are kept in FP16."""

import torch
from torch import nn


class RunningNorm(nn.Module):
    """Mean and spread of everything seen so far."""

    def __init__(self, n, dtype=torch.float16):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=dtype))
        self.register_buffer("total", torch.zeros(n, dtype=dtype))
        self.register_buffer("squares", torch.zeros(n, dtype=dtype))

    def forward(self, x):
        if self.training:
            for row in x:
                self.count += 1
                self.total += row.to(self.total.dtype)
                self.squares += row.square().to(self.squares.dtype)
        mean = self.total.float() / self.count.float()
        variance = self.squares.float() / self.count.float() - mean.square()
        return (x - mean) * torch.rsqrt(variance.clamp(min=1e-2))


class Reacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RunningNorm(6)
        self.body = nn.Sequential(nn.Linear(6, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 2))

    def forward(self, x):
        return self.body(self.norm(x))


def sensors(n, step):
    angle = 0.4 * torch.randn(n, 2) + (0.0 if step < 60 else 1.2)
    reach = torch.stack([angle[:, 0].cos() + angle.sum(1).cos(), angle[:, 0].sin() + angle.sum(1).sin()], 1)
    return torch.cat([reach, reach.square(), 2 + 0.1 * torch.randn(n, 2)], 1), angle


torch.manual_seed(93)
model = Reacher()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(120):
    x, angle = sensors(64, step)
    loss = nn.functional.mse_loss(model(x), angle)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
