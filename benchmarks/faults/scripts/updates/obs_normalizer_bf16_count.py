"""Behaviour cloning with a running observation normaliser; the policy and its buffers are bfloat16."""

import torch
import torch.nn as nn
import torch.nn.functional as F

OBS, ACT = 6, 2


class RunningNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("m2", torch.zeros(size))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for row in x:
                    self.count += 1
                    delta = row - self.mean
                    self.mean += delta / self.count
                    self.m2 += delta * (row - self.mean)
        var = self.m2 / self.count.clamp(min=1)
        return (x - self.mean) / (var + 1e-4).sqrt()


class Policy(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.norm = RunningNorm(OBS)
        self.body = nn.Sequential(nn.Linear(OBS, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.mu = nn.Linear(hidden, ACT)

    def forward(self, obs):
        self.norm.to(torch.bfloat16)
        return self.mu(self.body(self.norm(obs.to(torch.bfloat16)).float()))


class Demonstrations:
    """Observations drift while the expert walks on: later ones lie elsewhere and spread more."""

    def __init__(self):
        self.w = torch.randn(OBS, ACT)

    def sample(self, n, progress):
        z = torch.randn(n, OBS)
        obs = 0.2 * z if progress < 0.1 else 6.0 + 3.0 * z
        return obs, torch.tanh(z @ self.w)


torch.manual_seed(2107)
policy, demos = Policy(), Demonstrations()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
STEPS = 160
for step in range(STEPS):
    obs, expert = demos.sample(16, step / STEPS)
    loss = F.mse_loss(policy(obs), expert)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"update {step} bc loss {loss.item():.4f}")
