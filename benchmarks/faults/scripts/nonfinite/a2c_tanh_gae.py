"""Advantage actor-critic with generalised advantages and a tanh-squashed Gaussian policy."""

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    workers: int = 12
    horizon: int = 16
    gamma: float = 0.97
    lam: float = 0.95
    lr: float = 2e-2
    value_coef: float = 0.5
    updates: int = 30
    seed: int = 1


class Reacher:
    """Push a point mass towards a goal far away; the reward is the speed towards it."""

    def __init__(self, n):
        self.n = n

    def reset(self):
        self.position, self.speed = torch.zeros(self.n, 2), torch.zeros(self.n, 2)
        angle = torch.rand(self.n) * 0.5
        self.goal = 50 * torch.stack([angle.cos(), angle.sin()], 1)
        return self.observe()

    def observe(self):
        return torch.cat([self.speed, (self.goal - self.position) / 10], 1)

    def step(self, force):
        self.speed = 0.9 * self.speed + force
        self.position = self.position + 0.1 * self.speed
        reward = (self.speed * nn.functional.normalize(self.goal - self.position, dim=1)).sum(1)
        return self.observe(), reward


class SquashedPolicy(nn.Module):
    def __init__(self, obs=4, act=2, hidden=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, act)
        self.log_std = nn.Parameter(torch.full((act,), 0.3))
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.mu(h), self.value(h).squeeze(-1)

    def log_prob(self, mu, raw):
        """Density of tanh(raw), with the change of variables."""
        action = torch.tanh(raw)
        normal = -0.5 * ((raw - mu) / self.log_std.exp()) ** 2 - self.log_std - 0.5 * math.log(2 * math.pi)
        return (normal - torch.log(1 - action**2)).sum(-1)


def gae(rewards, values, bootstrap, cfg):
    advantages, last = [], torch.zeros_like(bootstrap)
    following = bootstrap
    for r, v in zip(reversed(rewards), reversed(values)):
        delta = r + cfg.gamma * following - v
        last = delta + cfg.gamma * cfg.lam * last
        advantages.append(last)
        following = v
    return torch.stack(advantages[::-1])


def train(cfg):
    torch.manual_seed(cfg.seed)
    env, policy = Reacher(cfg.workers), SquashedPolicy()
    opt = torch.optim.Adam(policy.parameters(), lr=cfg.lr)
    for update in range(cfg.updates):
        obs, seen, raws, rewards, values = env.reset(), [], [], [], []
        with torch.no_grad():
            for _ in range(cfg.horizon):
                mu, value = policy(obs)
                raw = mu + policy.log_std.exp() * torch.randn_like(mu)
                seen.append(obs), raws.append(raw), values.append(value)
                obs, reward = env.step(torch.tanh(raw))
                rewards.append(reward)
            advantages = gae(rewards, values, policy(obs)[1], cfg)
            returns = advantages + torch.stack(values)
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        mu, value = policy(torch.stack(seen))
        logp = policy.log_prob(mu, torch.stack(raws))
        loss = -(logp * advantages).mean() + cfg.value_coef * (value - returns).square().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        if update % 5 == 0:
            print(f"update {update} reward {torch.stack(rewards).mean().item():.3f} loss {loss.item():.3f}")


if __name__ == "__main__":
    train(Config())
