"""Advantage-weighted actor-critic for a picking arm: offline logs first, then the robot's own experience."""

import math

import torch
import torch.nn.functional as F
from torch import nn

OBS, ACT = 6, 2


def mlp(inputs, outputs, width=64):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class SquashedGaussian(nn.Module):
    """Log-density of an action under tanh of a normal variable."""

    def forward(self, mean, log_std, action):
        raw = torch.atanh(action)
        z = (raw - mean) * torch.exp(-log_std)
        log_prob = -0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)
        return (log_prob - torch.log(1 - action.square() + 1e-6)).sum(-1)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = mlp(OBS, 2 * ACT)
        self.density = SquashedGaussian()

    def forward(self, obs, action):
        mean, log_std = self.trunk(obs).chunk(2, -1)
        return self.density(mean, log_std.clamp(-3, 1), action)

    @torch.no_grad()
    def act(self, obs):
        mean, log_std = self.trunk(obs).chunk(2, -1)
        return torch.tanh(mean + log_std.clamp(-3, 1).exp() * torch.randn_like(mean))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = mlp(OBS + ACT, 1)

    def forward(self, obs, action):
        return self.q(torch.cat([obs, action], -1)).squeeze(-1)


class Replay:
    def __init__(self):
        self.parts = []

    def add(self, obs, action, reward):
        self.parts.append((obs, action, reward))

    def sample(self, size, recent):
        obs, action, reward = self.parts[-1] if recent else self.parts[0]
        rows = torch.randint(len(obs), (size,))
        return obs[rows], action[rows], reward[rows]


def reward_of(obs, action):
    wanted = torch.tanh(obs[:, :2] + 0.5 * obs[:, 2:4])
    return -(action - wanted).square().sum(-1)


def offline_log(n):
    obs = torch.randn(n, OBS)
    action = 0.9 * torch.tanh(obs[:, :ACT] + 0.7 * torch.randn(n, ACT))
    return obs, action, reward_of(obs, action)


def robot_log(actor, n):
    """The controller adds its own exploration and respects the joint limits."""
    obs = torch.randn(n, OBS)
    action = (actor.act(obs) + 0.1 * torch.randn(n, ACT)).clamp(-1, 1)
    return obs, action, reward_of(obs, action)


torch.manual_seed(31)
actor, critic, replay = Actor(), Critic(), Replay()
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
replay.add(*offline_log(4000))
OFFLINE, TOTAL = 160, 220
for it in range(TOTAL):
    if it >= OFFLINE and (it - OFFLINE) % 20 == 0:
        replay.add(*robot_log(actor, 500))
    obs, action, reward = replay.sample(64, recent=it >= OFFLINE and it % 2 == 1)
    critic_loss = F.mse_loss(critic(obs, action), reward)
    critic_opt.zero_grad()
    critic_loss.backward()
    critic_opt.step()

    with torch.no_grad():
        advantage = reward - critic(obs, actor.act(obs))
        weight = torch.softmax(advantage / 0.5, 0) * len(advantage)
    actor_loss = -(weight * actor(obs, action)).mean()
    actor_opt.zero_grad()
    actor_loss.backward()
    actor_opt.step()
    if it % 20 == 0:
        print(f"it {it:4d} critic loss {critic_loss.item():.4f} actor loss {actor_loss.item():.4f}")
