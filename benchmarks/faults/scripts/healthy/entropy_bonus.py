"""A policy gradient with an entropy bonus over legal moves only: 0 log 0 handled by xlogy and by Categorical."""

import torch
from torch import nn
from torch.distributions import Categorical


class MovePicker(nn.Module):
    def __init__(self, cells=9):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(cells, 48), nn.ReLU(), nn.Linear(48, cells))

    def forward(self, board):
        return self.net(board).masked_fill(board != 0, float("-inf"))


def boards(n):
    filled = torch.rand(n, 9) < 0.4
    filled[:, 0] = False
    return filled * torch.where(torch.rand(n, 9) < 0.5, 1.0, -1.0)


torch.manual_seed(0)
policy = MovePicker()
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
baseline, best = 0.0, float("-inf")
for step in range(20):
    board = boards(32)
    logits = policy(board)
    p = logits.softmax(-1)
    move = Categorical(p.detach()).sample()
    reward = (move % 2 == 0).float()
    legal = board == 0
    logp = torch.where(legal, logits, 0.0) - logits.logsumexp(-1, keepdim=True)
    entropy = -torch.special.xlogy(p.detach(), p.detach()).sum(-1).mean()
    loss = (
        -(logp.gather(1, move[:, None]).squeeze(1) * (reward - baseline)).mean() - 0.01 * (-(p * logp).sum(-1)).mean()
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    best = max(best, reward.mean().item())
    if step % 5 == 0:
        print(f"step {step}: best {best:.2f} entropy {entropy.item():.3f}")
