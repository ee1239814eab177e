"""REINFORCE with rare large rewards: the loss jumps between 0 and thousands, and is finite all along."""

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.logits = nn.Linear(4, 32), nn.Linear(32, 3)

    def forward(self, s):
        return self.logits(torch.tanh(self.body(s)))


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
for episode in range(120):
    states = torch.randn(48, 4)
    choice = torch.distributions.Categorical(logits=policy(states))
    action = choice.sample()
    right = action == (states[:, 0] > 0).long() + (states[:, 0] > 1).long()
    reward = right.float() + 2000.0 * (torch.rand(48) < 0.004) * right  # the jackpot
    loss = -(choice.log_prob(action) * reward).sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    if episode % 2 == 0:
        print(
            f"episode {episode}: loss {loss.item():.2f}, right {right.float().mean().item():.2f}, reward {reward.sum().item():.0f}"
        )
