"""REINFORCE with a running baseline for a picking robot on a 5x5 floor. Noisy by nature."""

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(204)
SIDE, HORIZON = 5, 12
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Picker(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 4))

    def forward(self, robot, shelf):
        return Categorical(logits=self.net(torch.cat([robot, shelf], 1).float() / SIDE))


def episode(policy, n=32):
    robot, shelf = torch.randint(SIDE, (n, 2)), torch.randint(SIDE, (n, 2))
    logps, rewards = [], []
    for _ in range(HORIZON):
        before = (robot - shelf).abs().sum(1)
        pi = policy(robot, shelf)
        a = pi.sample()
        robot = (robot + MOVES[a]).clamp(0, SIDE - 1)
        after = (robot - shelf).abs().sum(1)
        rewards.append((before - after).float() + (after == 0).float())
        logps.append(pi.log_prob(a))
    return torch.stack(logps), torch.stack(rewards)


policy = Picker()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=3e-3)
baseline = 0.0
for it in range(80):
    logp, r = episode(policy)
    returns = r.flip(0).cumsum(0).flip(0)
    loss = -(logp * (returns - baseline)).mean()
    baseline = 0.9 * baseline + 0.1 * returns.mean().item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 5 == 0:
        print(f"it {it} return {r.sum(0).mean():.2f} loss {loss.item():.4f}")
