"""An actor-critic that dispatches a lift: returns are noisy, advantages are normalised, entropy falls."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LiftPolicy(nn.Module):
    def __init__(self, floors=6, hidden=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * floors, hidden), nn.Tanh())
        self.actor, self.critic = nn.Linear(hidden, 3), nn.Linear(hidden, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, obs):
        h = self.body(obs)
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)


class Lifts:
    """Many lifts at once; each has one caller, who is a new one when served."""

    def __init__(self, n, floors=6):
        self.n, self.floors = n, floors
        self.at, self.call = torch.randint(floors, (n,)), torch.randint(floors, (n,))

    def observe(self):
        return torch.cat([F.one_hot(self.at, self.floors), F.one_hot(self.call, self.floors)], 1).float()

    def step(self, action):
        self.at = (self.at + action - 1).clamp(0, self.floors - 1)
        served = self.at == self.call
        self.call = torch.where(served, torch.randint(self.floors, (self.n,)), self.call)
        return served.float() * 10 - 0.1


torch.manual_seed(347)
lifts, policy = Lifts(24), LiftPolicy()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=2e-3, eps=1e-5)
for update in range(80):
    rows = []
    for _ in range(8):
        dist, value = policy(lifts.observe())
        action = dist.sample()
        rows.append((dist.log_prob(action), value, lifts.step(action), dist.entropy()))
    log_prob, value, reward, entropy = (torch.stack(column) for column in zip(*rows))
    with torch.no_grad():
        running = policy(lifts.observe())[1]
        returns = torch.empty_like(reward)
        for t in reversed(range(len(reward))):
            running = reward[t] + 0.95 * running
            returns[t] = running
    advantage = (returns - value).detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    loss = -(log_prob * advantage).mean() + 0.5 * F.mse_loss(value, returns) - 0.01 * entropy.mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()
    if update % 2 == 0:
        print(f"update {update} reward {reward.mean().item():.2f} loss {loss.item():.4f}")
