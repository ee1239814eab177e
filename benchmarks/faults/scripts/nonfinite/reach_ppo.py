"""PPO on a reaching task whose episodes end when the target is touched; minibatches of 32 from each rollout."""

import torch
from torch import nn
from torch.distributions import Normal

GAMMA, LAMBDA, CLIP = 0.97, 0.95, 0.2


class ReachEnv:
    def __init__(self, generator):
        self.generator = generator

    def reset(self):
        self.place = torch.zeros(2)
        self.target = 2 * torch.rand(2, generator=self.generator) - 1
        self.time = 0
        return self.observe()

    def observe(self):
        return torch.cat([self.place, self.target, self.target - self.place])

    def step(self, action):
        self.place = (self.place + 0.15 * action.clamp(-1, 1)).clamp(-1.5, 1.5)
        self.time += 1
        distance = (self.target - self.place).norm().item()
        done = distance < 0.15 or self.time >= 25
        return self.observe(), -0.1 * distance + (1.0 if distance < 0.15 else 0.0), done


class ActorCritic(nn.Module):
    def __init__(self, obs=6, act=2, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.mean = nn.Linear(width, act)
        self.value = nn.Linear(width, 1)
        self.log_std = nn.Parameter(torch.full((act,), -0.5))

    def forward(self, obs):
        h = self.body(obs)
        return self.mean(h), self.log_std.exp(), self.value(h).squeeze(-1)


def policy(model, obs):
    mean, std, value = model(obs)
    return Normal(mean, std.expand_as(mean)), value


@torch.no_grad()
def rollout(env, model, episodes):
    steps, segments = [], []
    for _ in range(episodes):
        obs, done, rows = env.reset(), False, []
        while not done:
            pi, value = policy(model, obs)
            action = pi.sample()
            following, reward, done = env.step(action)
            rows.append((obs, action, pi.log_prob(action).sum(), value, torch.tensor(reward)))
            obs = following
        advantage, last = torch.zeros(len(rows)), 0.0
        values = [r[3] for r in rows] + [torch.zeros(())]
        for t in reversed(range(len(rows))):
            delta = rows[t][4] + GAMMA * values[t + 1] - values[t]
            last = delta + GAMMA * LAMBDA * last
            advantage[t] = last
        steps += rows
        segments.append(advantage)
    obs, action, log_prob, value, _ = (torch.stack(x) for x in zip(*steps, strict=True))
    advantage = torch.cat(segments)
    return obs, action, log_prob, advantage, advantage + value


def ppo_loss(model, obs, action, old_log_prob, advantage, returns):
    pi, value = policy(model, obs)
    ratio = (pi.log_prob(action).sum(-1) - old_log_prob).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -surrogate.mean() + 0.5 * (value - returns).square().mean() - 0.002 * pi.entropy().sum(-1).mean()


def main(iterations=20, batch=32):
    torch.manual_seed(4)
    env, model = ReachEnv(torch.Generator().manual_seed(8)), ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
    for iteration in range(iterations):
        data = rollout(env, model, episodes=4)
        for _ in range(2):
            for rows in torch.randperm(len(data[0])).split(batch):
                loss = ppo_loss(model, *(x[rows] for x in data))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        print(f"iteration {iteration:2d}: {len(data[0]):3d} transitions, return {data[4].mean():.3f}, loss {loss:.3f}")


if __name__ == "__main__":
    main()
