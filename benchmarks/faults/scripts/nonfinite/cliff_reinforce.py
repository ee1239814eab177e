"""REINFORCE with standardised returns on a little cliff walk; an episode ends when the walker falls."""

import torch
from torch import nn
from torch.distributions import Categorical


class Cliff:
    """Positions 0..6; falling off at 0 ends the episode, 6 is the goal."""

    def __init__(self, start):
        self.start = start

    def reset(self):
        self.at, self.t = self.start, 0
        return self.observe()

    def observe(self):
        x = torch.zeros(7)
        x[self.at] = 1.0
        return x

    def step(self, action):
        self.at += 1 if action == 1 else -1
        self.t += 1
        if self.at <= 0:
            return self.observe(), -5.0, True
        if self.at >= 6:
            return self.observe(), 10.0, True
        return self.observe(), -0.1, self.t >= 20


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x):
        return self.net(x)


def discounted(rewards, gamma=0.97):
    returns, g = [], 0.0
    for r in reversed(rewards):
        g = r + gamma * g
        returns.insert(0, g)
    return torch.tensor(returns)


def episode(env, policy):
    obs, done, rewards, log_probs = env.reset(), False, [], []
    while not done:
        dist = Categorical(logits=policy(obs))
        action = dist.sample()
        log_probs.append(dist.log_prob(action))
        obs, reward, done = env.step(action.item())
        rewards.append(reward)
    return rewards, torch.stack(log_probs)


torch.manual_seed(4)
policy = Policy()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=2e-3)
starts = [3] * 16 + [3, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1]  # ever nearer to the edge
for number, start in enumerate(starts):
    rewards, log_probs = episode(Cliff(start), policy)
    returns = discounted(rewards)
    advantage = (returns - returns.mean()) / (returns.std() + 1e-8)
    loss = -(log_probs * advantage).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number % 5 == 0:
        print(f"episode {number}: {len(rewards)} steps, return {sum(rewards):.1f}")
