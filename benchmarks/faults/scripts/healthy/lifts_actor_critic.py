"""Advantage actor-critic that parks a lift: returns of tens, sparse rewards, an entropy bonus, RMSprop."""

import torch
import torch.nn as nn
import torch.nn.functional as F

FLOORS, HORIZON = 9, 20


class ActorCritic(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * FLOORS, hidden), nn.Tanh())
        self.actor, self.critic = nn.Linear(hidden, 3), nn.Linear(hidden, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, state):
        h = self.body(state)
        return self.actor(h), self.critic(h).squeeze(-1)


def observe(floor, call):
    return torch.cat([F.one_hot(floor, FLOORS), F.one_hot(call, FLOORS)], 1).float()


torch.manual_seed(3)
model = ActorCritic()
optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, alpha=0.99, eps=1e-5)
for update in range(80):
    floor, call = torch.randint(FLOORS, (16,)), torch.randint(FLOORS, (16,))
    logps, values, rewards, entropies = [], [], [], []
    for _ in range(HORIZON):
        logits, value = model(observe(floor, call))
        policy = torch.distributions.Categorical(logits=logits)
        action = policy.sample()
        floor = (floor + action - 1).clamp(0, FLOORS - 1)
        arrived = floor == call
        rewards.append(10.0 * arrived.float() - 0.1)
        call = torch.where(arrived, torch.randint(FLOORS, (16,)), call)
        logps.append(policy.log_prob(action))
        values.append(value)
        entropies.append(policy.entropy())
    returns, running = [], model(observe(floor, call))[1].detach()
    for r in reversed(rewards):
        running = r + 0.95 * running
        returns.insert(0, running)
    returns, values = torch.stack(returns), torch.stack(values)
    advantage = (returns - values).detach()
    policy_loss = -(torch.stack(logps) * advantage).mean()
    loss = policy_loss + 0.5 * F.mse_loss(values, returns) - 0.01 * torch.stack(entropies).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if update % 4 == 0:
        print(f"update {update} reward {torch.stack(rewards).sum(0).mean():.2f} loss {loss.item():.3f}")
