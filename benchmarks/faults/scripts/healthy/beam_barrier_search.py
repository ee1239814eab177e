"""A beam's thickness profile by a log barrier and backtracking: steps beyond the barrier cost infinity and are taken back."""

import math

import torch
from torch import nn


class Profile(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        nn.init.constant_(self.net[-1].bias, 1.0)

    def forward(self, s):
        return self.net(s).squeeze(-1)


class Barrier(nn.Module):
    """Mass plus compliance, and a wall at 0.2 <= thickness <= 2."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, thickness, bending):
        wall = -torch.log(thickness - 0.2) - torch.log(2 - thickness)
        cost = thickness + bending**2 / thickness**3 + self.weight * wall
        return torch.nan_to_num(cost, nan=math.inf, posinf=math.inf).mean()


class Backtracking(torch.optim.Optimizer):
    """Steepest descent whose step is halved until the objective falls enough (Armijo)."""

    def __init__(self, params, lr=1.0, c=1e-4, tries=40):
        super().__init__(params, {"lr": lr, "c": c, "tries": tries})

    @torch.no_grad()
    def step(self, objective):
        group = self.param_groups[0]
        here = objective()
        params = [p for p in group["params"] if p.grad is not None]
        old = [p.clone() for p in params]
        slope = sum((p.grad**2).sum() for p in params)
        rate = group["lr"]
        for _ in range(group["tries"]):
            for p, o in zip(params, old):
                p.copy_(o - rate * p.grad)
            if objective() <= here - group["c"] * rate * slope:
                return rate
            rate /= 2
        for p, o in zip(params, old):
            p.copy_(o)
        return 0.0


torch.manual_seed(58)
profile, barrier = Profile(), Barrier(0.05)
optimizer = Backtracking(profile.parameters(), lr=64.0)
s = torch.linspace(-1, 1, 65).unsqueeze(-1)
bending = (1 - s.squeeze(-1) ** 2) * 0.8


def objective():
    return barrier(profile(s), bending)


best = math.inf
for it in range(20):
    optimizer.zero_grad()
    loss = objective()
    loss.backward()
    rate = optimizer.step(objective)
    best = min(best, loss.item())
    if it % 4 == 0:
        print(f"it {it} objective {loss.item():.5f} rate {rate:.4f} best {best:.5f}")
