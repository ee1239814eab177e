"""PPO on a bandit with contexts: a first epoch whose ratio is exactly 1, advantages that are normalised, an early stop."""

import torch
from torch import nn

torch.manual_seed(3220)
ACTIONS, STATES = 4, 5
best = torch.randn(STATES, ACTIONS)
policy = nn.Sequential(nn.Linear(STATES, 32), nn.Tanh(), nn.Linear(32, ACTIONS))
nn.init.zeros_(policy[-1].weight)
nn.init.zeros_(policy[-1].bias)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2, eps=1e-5)


def gumbel(shape):
    return -torch.log(-torch.log(torch.rand(shape).clamp(1e-6, 1 - 1e-6)))


for iteration in range(30):
    state = torch.randn(256, STATES)
    gain = 1e-3 * torch.tanh(state @ best)
    with torch.no_grad():
        old = policy(state).log_softmax(-1)
        action = (old + gumbel(old.shape)).argmax(-1, keepdim=True)
        old = old.gather(1, action)
    advantage = gain.gather(1, action)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(3):
        new = policy(state).log_softmax(-1).gather(1, action)
        ratio = (new - old).exp()
        objective = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        if (old - new).mean() > 0.03:
            break
        optimizer.zero_grad()
        objective.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
    regret = 1e3 * (gain.amax(1) - gain.gather(1, action).squeeze(1)).mean()
    if iteration % 3 == 0:
        print(f"iteration {iteration}: objective {objective.item():.4f} regret loss {regret.item():.4f}")
