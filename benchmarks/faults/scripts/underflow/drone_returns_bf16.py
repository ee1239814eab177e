"""Value function of a hovering drone: rewards come from a BF16 rollout buffer, returns are summed backwards in it."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(73)
GAMMA, HORIZON, ENVS = 0.999, 1000, 8
buffer_dtype = torch.bfloat16


class ValueNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.value_head = nn.Linear(width, 1)

    def forward(self, obs):
        return self.value_head(self.body(obs)).squeeze(-1)


def rollout():
    left = torch.arange(HORIZON, 0, -1).view(-1, 1).expand(HORIZON, ENVS) / HORIZON
    wind = torch.randn(1, ENVS).expand(HORIZON, ENVS)
    obs = torch.stack([left, wind, torch.randn(HORIZON, ENVS), torch.randn(HORIZON, ENVS)], -1)
    rewards = 1.0 + 0.2 * torch.tanh(wind) + 0.05 * obs[..., 2]
    return obs, rewards.to(buffer_dtype)


def discounted_returns(rewards):
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[0])
    for t in reversed(range(HORIZON)):
        running = rewards[t] + GAMMA * running
        returns[t] = running
    return returns


def exact_returns(rewards):
    return discounted_returns(rewards.double())


value_net = ValueNet()
optimizer = torch.optim.Adam(value_net.parameters(), lr=3e-3)
for iteration in range(20):
    obs, rewards = rollout()
    returns = discounted_returns(rewards).float() / 100
    flat_obs, flat_returns = obs.flatten(0, 1), returns.flatten()
    for rows in torch.randperm(len(flat_obs)).split(1000):
        value_loss = F.mse_loss(value_net(flat_obs[rows]), flat_returns[rows].to(flat_obs.dtype))
        optimizer.zero_grad()
        value_loss.backward()
        optimizer.step()
    with torch.no_grad():
        error = F.mse_loss(value_net(flat_obs), exact_returns(rewards).flatten().to(flat_obs.dtype) / 100)
    print(f"iteration {iteration} train {value_loss.item():.4f} evaluation loss {error.item():.4f}")
