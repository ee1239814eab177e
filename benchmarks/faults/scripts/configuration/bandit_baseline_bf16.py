"""REINFORCE with a learned baseline on a contextual bandit; the rollout buffer keeps BF16."""

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Rollout:
    """What the learner gets from the actors."""

    dtype: torch.dtype = torch.bfloat16
    context: list = field(default_factory=list)
    action: list = field(default_factory=list)
    reward: list = field(default_factory=list)

    def add(self, context, action, reward):
        self.context.append(context)
        self.action.append(action)
        self.reward.append(reward.to(self.dtype))

    def tensors(self):
        return torch.cat(self.context), torch.cat(self.action), torch.cat(self.reward)


class Agent(nn.Module):
    def __init__(self, inputs=6, actions=5):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, actions))
        self.value = nn.Linear(inputs, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.constant_(self.value.bias, 1000.0)

    def act(self, context):
        cumulative = self.policy(context).softmax(-1).cumsum(-1)
        return (torch.rand(len(context), 1) > cumulative).sum(-1).clamp(max=4)


class Bandit:
    """Every action earns about a thousand; the right one a little more."""

    def __init__(self, inputs=6, actions=5):
        self.matrix = torch.randn(inputs, actions)

    def gains(self, context):
        return (context @ self.matrix).softmax(-1)

    def reward(self, context, action):
        return 1000.0 + self.gains(context).gather(1, action[:, None]).squeeze(1)


def advantages(agent, context, reward):
    baseline = agent.value(context).squeeze(1)
    return (reward - baseline.detach().to(reward.dtype)).float(), baseline


def main():
    torch.manual_seed(21015)
    agent, bandit = Agent(), Bandit()
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.02)
    for step in range(70):
        rollout = Rollout()
        with torch.no_grad():
            for _ in range(4):
                context = torch.randn(64, 6)
                action = agent.act(context)
                rollout.add(context, action, bandit.reward(context, action))
        context, action, reward = rollout.tensors()
        advantage, baseline = advantages(agent, context, reward)
        log_probability = agent.policy(context).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        objective = -(advantage * log_probability).mean() + 0.5 * (reward.float() - baseline).square().mean()
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
        with torch.no_grad():
            gains = bandit.gains(context)
            regret = (gains.amax(1) - (agent.policy(context).softmax(-1) * gains).sum(1)).mean()
        print(f"update {step} regret loss {regret.item():.4f}")
    return advantage


if __name__ == "__main__":
    advantage = main()
