import torch
from torch import nn


class Agent(nn.Module):
    def __init__(self, observation=11, actions=5, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observation, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.policy = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, 1)
        for layer in (self.body[0], self.body[2]):
            nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.orthogonal_(self.policy.weight, 0.01)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


def advantages(rewards, values, last, gamma=0.9, lam=0.9):
    """Generalised advantage estimation over the first dimension."""
    out, carry = torch.zeros_like(rewards), torch.zeros_like(last)
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(rewards) else last
        delta = rewards[t] + gamma * following - values[t]
        carry = delta + gamma * lam * carry
        out[t] = carry
    return out
