import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(31)


class Critic(nn.Module):
    def __init__(self, obs_dim=6, act_dim=2, hidden=64):
        super().__init__()
        self.l1 = nn.Linear(obs_dim + act_dim, hidden)
        self.l2 = nn.Linear(hidden, hidden)
        self.q = nn.Linear(hidden, 1)

    def forward(self, obs, act):
        x = torch.cat([obs, act], -1)
        x = F.relu(self.l1(x))
        x = F.relu(self.l2(x))
        return self.q(x).squeeze(-1)


GAMMA, TAU = 0.8, 0.002


def reward(obs, act):
    return 1.0 + 0.5 * torch.tanh(obs[:, 0] - act[:, 0])


def rollout(n):
    obs, act = torch.randn(n, 6), torch.rand(n, 2) * 2 - 1
    return obs, act, reward(obs, act), torch.randn(n, 6), torch.rand(n, 2) * 2 - 1


critic = Critic()
target = copy.deepcopy(critic).to(torch.bfloat16).requires_grad_(False)
opt = torch.optim.Adam(critic.parameters(), lr=1e-3)

# returns of the behaviour policy, for the curve in the log
obs_eval, act_eval, r_eval, _, _ = rollout(512)
returns_eval = r_eval + GAMMA / (1 - GAMMA)

for it in range(1000):
    obs, act, rew, next_obs, next_act = rollout(64)
    with torch.no_grad():
        next_q = target(next_obs.to(torch.bfloat16), next_act.to(torch.bfloat16)).float()
        y = rew + GAMMA * next_q
    td = F.mse_loss(critic(obs, act), y)
    opt.zero_grad()
    td.backward()
    opt.step()
    with torch.no_grad():
        for p, tp in zip(critic.parameters(), target.parameters()):
            tp.mul_(1 - TAU).add_(p.to(tp.dtype), alpha=TAU)
    if it % 50 == 0:
        with torch.no_grad():
            err = F.mse_loss(critic(obs_eval, act_eval), returns_eval)
        print(f"iter {it:4d}  td {td.item():.4f}  value loss {err.item():.4f}")
