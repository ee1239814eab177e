"""Energy-based model; negatives by Langevin dynamics from a replay buffer."""

import torch
from torch import nn


class Energy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.potential = nn.Sequential(
            nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )
        self.confine = nn.Parameter(torch.tensor(0.05))

    def forward(self, x):
        well = x.pow(2).sum(-1)
        return self.potential(x).squeeze(-1) + self.confine * well


class Sampler:
    def __init__(self, energy, size=256, step_size=0.2, steps=15):
        self.energy, self.step_size, self.steps = energy, step_size, steps
        self.buffer = torch.randn(size, 2)

    def draw(self, n):
        index = torch.randperm(len(self.buffer))[:n]
        x = self.buffer[index].requires_grad_(True)
        for _ in range(self.steps):
            (gradient,) = torch.autograd.grad(self.energy(x).sum(), x)
            x = (x - self.step_size * gradient + 0.05 * torch.randn_like(x)).detach().requires_grad_(True)
        self.buffer[index] = x.detach()
        return x.detach()


def moons(n):
    t = 3.1416 * torch.rand(n)
    upper = torch.rand(n) < 0.5
    x = torch.where(upper, t.cos(), 1 - t.cos())
    return torch.stack([x, torch.where(upper, t.sin(), 0.5 - t.sin())], 1) + 0.05 * torch.randn(n, 2)


torch.manual_seed(4)
energy = Energy()
sampler = Sampler(energy)
optimizer = torch.optim.Adam(
    [{"params": energy.potential.parameters()}, {"params": [energy.confine], "lr": 3.0}], lr=2e-3
)
for step in range(20):
    positive, negative = moons(64), sampler.draw(64)
    e_pos, e_neg = energy(positive), energy(negative)
    loss = e_pos.mean() - e_neg.mean() + 0.01 * (e_pos**2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4g}")
