"""Fits a quantile critic (QR-DQN) to Monte Carlo returns of a logged policy, with the paper's optimizer settings."""

import torch
import torch.nn as nn

QUANTILES, ACTIONS = 32, 4
REWARD_SCALE = 0.01


class QuantileCritic(nn.Module):
    def __init__(self, obs=10, hidden=96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU())
        self.advantage = nn.Linear(hidden, ACTIONS * QUANTILES)
        self.value = nn.Linear(hidden, QUANTILES)

    def forward(self, obs, action):
        h = self.body(obs)
        a = self.advantage(h).view(-1, ACTIONS, QUANTILES)
        z = self.value(h)[:, None] + a - a.mean(1, keepdim=True)
        return z[torch.arange(len(z)), action]


def quantile_huber(quantiles, returns, kappa=1.0):
    tau = (torch.arange(QUANTILES) + 0.5) / QUANTILES
    delta = returns[:, None] - quantiles
    huber = torch.where(delta.abs() < kappa, 0.5 * delta**2, kappa * (delta.abs() - 0.5 * kappa))
    return ((tau - (delta < 0).float()).abs() * huber).mean()


class Log:
    def __init__(self, n=4096, obs=10):
        self.obs, self.action = torch.randn(n, obs), torch.randint(ACTIONS, (n,))
        gain = torch.randn(ACTIONS, obs)
        mean = (gain[self.action] * torch.tanh(self.obs)).sum(1)
        self.returns = REWARD_SCALE * (mean + (0.2 + 0.3 * self.obs[:, 0].abs()) * torch.randn(n))

    def sample(self, n):
        pick = torch.randint(len(self.obs), (n,))
        return self.obs[pick], self.action[pick], self.returns[pick]


torch.manual_seed(83)
log, critic = Log(), QuantileCritic()
for layer in (critic.advantage, critic.value):
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
optimizer = torch.optim.Adam(critic.parameters(), lr=5e-4, eps=0.01 / 32)
for update in range(400):
    obs, action, returns = log.sample(64)
    loss = quantile_huber(critic(obs, action), returns)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 10 == 0:
        print(f"update {update}, loss {loss.item():.4e}")
