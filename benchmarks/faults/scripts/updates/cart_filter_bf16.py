"""Policy gradient on a cart that must be stopped; observations are normalised by running statistics in BF16."""

import torch
from torch import nn

DTYPE = torch.bfloat16


class RunningNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=DTYPE))
        self.register_buffer("total", torch.zeros(size, dtype=DTYPE))
        self.register_buffer("total_sq", torch.zeros(size, dtype=DTYPE))

    @torch.no_grad()
    def update(self, x):
        for row in x.to(DTYPE):
            self.count += 1
            self.total += row
            self.total_sq += row * row

    def forward(self, x):
        mean = self.total.float() / self.count.float()
        var = self.total_sq.float() / self.count.float() - mean * mean
        return (x - mean) / var.clamp(min=1e-4).sqrt()


class Policy(nn.Module):
    def __init__(self, obs=3):
        super().__init__()
        self.filter = RunningNorm(obs)
        self.net = nn.Sequential(nn.Linear(obs, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, obs):
        return self.net(self.filter(obs))[:, 0]


def reset(n):
    """Position around 50 m, speed, and a load of about 20 kg that says how strongly the brake acts."""
    return torch.stack([50 + 5 * torch.randn(n), 2 * torch.randn(n), 20 + torch.randn(n)], 1)


def advance(state, force):
    x, v, load = state.unbind(1)
    v = v + 0.3 * force * (1 + 0.5 * (load - 20))
    return torch.stack([x + 0.1 * v, v, load], 1), -((x + 0.1 * v - 50) ** 2 * 0.05 + v**2 + 0.01 * force**2)


torch.manual_seed(6)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
for iteration in range(60):
    state, returns = reset(24), 0.0
    for _ in range(10):
        policy.filter.update(state.detach())
        state, reward = advance(state, policy(state))
        returns = returns + reward
    loss = -returns.mean() / 10
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    if iteration % 2 == 0:
        print(f"iteration {iteration} loss {loss.item():.4f}")
