"""PPO in corridors with a reward at the far end: normalised advantages, clipped ratios, small gradient norm."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical


@dataclass
class Config:
    envs: int = 32
    rollout: int = 24
    updates: int = 24
    epochs: int = 3
    minibatches: int = 4
    gamma: float = 0.97
    lam: float = 0.9
    clip: float = 0.2
    lr: float = 2e-3
    max_norm: float = 0.5
    seed: int = 6


class Corridors:
    """Ten cells, start in the first; a step costs 0.02, the last cell pays 1."""

    LENGTH = 10

    def __init__(self, n):
        self.cell = torch.zeros(n, dtype=torch.long)
        self.age = torch.zeros(n, dtype=torch.long)

    def observe(self):
        return F.one_hot(self.cell, self.LENGTH).float()

    def step(self, action):
        self.cell = (self.cell + 2 * action - 1).clamp(0, self.LENGTH - 1)
        self.age += 1
        won = self.cell == self.LENGTH - 1
        done = won | (self.age >= 40)
        self.cell[done], self.age[done] = 0, 0
        return won.float() - 0.02, done.float()


class Agent(nn.Module):
    def __init__(self, obs, actions):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs, 32), nn.Tanh(), nn.Linear(32, actions))
        self.critic = nn.Sequential(nn.Linear(obs, 32), nn.Tanh(), nn.Linear(32, 1))
        nn.init.orthogonal_(self.actor[2].weight, 0.01)

    def forward(self, obs):
        return Categorical(logits=self.actor(obs)), self.critic(obs)[:, 0]


def main(cfg):
    torch.manual_seed(cfg.seed)
    env, agent = Corridors(cfg.envs), Agent(Corridors.LENGTH, 2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=cfg.lr, eps=1e-5)
    for update in range(cfg.updates):
        store = {k: [] for k in ("obs", "action", "log_prob", "value", "reward", "done")}
        with torch.no_grad():
            for _ in range(cfg.rollout):
                obs = env.observe()
                dist, value = agent(obs)
                action = dist.sample()
                reward, done = env.step(action)
                for k, v in zip(store, (obs, action, dist.log_prob(action), value, reward, done)):
                    store[k].append(v)
            last = agent(env.observe())[1]
        s = {k: torch.stack(v) for k, v in store.items()}
        advantage, running = torch.zeros_like(s["value"]), torch.zeros(cfg.envs)
        for t in reversed(range(cfg.rollout)):
            after = last if t == cfg.rollout - 1 else s["value"][t + 1]
            delta = s["reward"][t] + cfg.gamma * after * (1 - s["done"][t]) - s["value"][t]
            running = delta + cfg.gamma * cfg.lam * (1 - s["done"][t]) * running
            advantage[t] = running
        target = (advantage + s["value"]).flatten()
        advantage = advantage.flatten()
        obs, action, old = (s[k].flatten(0, 1) for k in ("obs", "action", "log_prob"))
        for _ in range(cfg.epochs):
            for idx in torch.randperm(len(obs)).chunk(cfg.minibatches):
                dist, value = agent(obs[idx])
                a = (advantage[idx] - advantage[idx].mean()) / (advantage[idx].std() + 1e-8)
                ratio = (dist.log_prob(action[idx]) - old[idx]).exp()
                surrogate = torch.minimum(ratio * a, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * a).mean()
                value_loss = F.mse_loss(value, target[idx])
                optimizer.zero_grad()
                (0.5 * value_loss - surrogate - 0.01 * dist.entropy().mean()).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), cfg.max_norm)
                optimizer.step()
        print(f"update {update} reward {s['reward'].mean().item():.4f} value loss {value_loss.item():.4f}")
    return agent


if __name__ == "__main__":
    agent = main(Config())
