"""A neural ODE of a damped pendulum: 40 Runge-Kutta steps, recomputed in the backward pass; it starts as no motion at all."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Motion(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
        nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)

    def forward(self, s):
        return self.net(s)


def rk4(f, s, h):
    k1 = f(s)
    k2 = f(s + h / 2 * k1)
    k3 = f(s + h / 2 * k2)
    k4 = f(s + h * k3)
    return s + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def pendulum(s):
    return torch.stack([s[:, 1], -2.0 * torch.sin(s[:, 0]) - 0.2 * s[:, 1]], 1)


def rollout(f, s, steps=40, h=0.05, save_memory=False):
    path = []
    for _ in range(steps):
        s = checkpoint(rk4, f, s, h, use_reentrant=False) if save_memory else rk4(f, s, h)
        path.append(s)
    return torch.stack(path, 1)


torch.manual_seed(116)
motion = Motion()
optimizer = torch.optim.Adam(motion.parameters(), lr=1e-2)
for step in range(50):
    start = torch.randn(32, 2)
    with torch.no_grad():
        target = rollout(pendulum, start)
    loss = nn.functional.mse_loss(rollout(motion, start, save_memory=True), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
