"""PPO on a little balancing task. One rollout is reused for several epochs."""

import torch
from torch import nn, optim
from torch.distributions import Normal


class Pole:
    """A linearised inverted pendulum with a continuous force."""

    def __init__(self, n):
        self.state = torch.zeros(n, 3)

    def reset(self):
        self.state = 0.1 * torch.randn_like(self.state)
        return self.state

    def step(self, force):
        x, v, w = self.state.unbind(1)
        v = v + 0.05 * (9.8 * x - w + force.squeeze(1))
        x = x + 0.05 * v
        self.state = torch.stack([x, v, 0.9 * w + 0.1 * force.squeeze(1)], 1).clamp(-2, 2)
        return self.state, 1.0 - x.abs().clamp(max=1.0)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.mean = nn.Linear(32, 1)
        self.value = nn.Linear(32, 1)
        self.log_std = nn.Parameter(torch.full((1,), -4.0))

    def forward(self, obs):
        h = self.body(obs)
        return self.mean(h), self.log_std.exp(), self.value(h).squeeze(-1)


def collect(env, agent, horizon=12):
    rows = []
    obs = env.reset()
    with torch.no_grad():
        for _ in range(horizon):
            mean, std, value = agent(obs)
            action = Normal(mean, std).sample()
            following, reward = env.step(action)
            rows.append((obs, action, Normal(mean, std).log_prob(action).sum(-1), reward, value))
            obs = following
    obs, action, logp, reward, value = (torch.stack(c) for c in zip(*rows))
    returns = reward.flip(0).cumsum(0).flip(0)
    advantage = returns - value
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return [t.flatten(0, 1) for t in (obs, action, logp, returns, advantage)]


def update(agent, opt, batch, clip=0.2, epochs=6):
    obs, action, old_logp, returns, advantage = batch
    for _ in range(epochs):
        mean, std, value = agent(obs)
        logp = Normal(mean, std).log_prob(action).sum(-1)
        ratio = torch.exp(old_logp - logp)
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        loss = -surrogate.mean() + 0.5 * (returns - value).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        opt.step()
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(2)
    env, agent = Pole(16), ActorCritic()
    opt = optim.Adam(agent.parameters(), lr=3e-2)
    for iteration in range(5):
        print("iteration", iteration, "loss", update(agent, opt, collect(env, agent)))
