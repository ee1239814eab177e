"""REINFORCE in a corridor where hardly any episode is rewarded: most gradients are exactly zero for a while."""

import torch
from torch import nn
from torch.distributions import Categorical


class Walker(nn.Module):
    def __init__(self, cells=13):
        super().__init__()
        self.cells = cells
        self.pi = nn.Sequential(nn.Linear(cells, 24), nn.Tanh(), nn.Linear(24, 2))

    def forward(self, cell):
        return Categorical(logits=self.pi(nn.functional.one_hot(cell, self.cells).float()))


def episode(policy, n=16, horizon=15):
    cell = torch.full((n,), 2)
    log_probs, reward, done = [], torch.zeros(n), torch.zeros(n, dtype=torch.bool)
    for _ in range(horizon):
        dist = policy(cell)
        action = dist.sample()
        log_probs.append(dist.log_prob(action) * (~done).float())
        cell = (cell + 2 * action - 1).clamp(0, 12)
        reached = (cell == 12) & ~done
        reward = reward + reached.float()
        done = done | reached
    return torch.stack(log_probs, 1).sum(1), reward


torch.manual_seed(113)
policy = Walker()
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
for update in range(240):
    log_prob, reward = episode(policy)
    loss = -(log_prob * reward).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 4 == 0:
        print(f"update {update} loss {loss.item():.4f} reward {reward.mean().item():.2f}")
