"""REINFORCE for a small trading desk: rewards are relative profits of some 1e-4, the policy is in FP16."""

import torch
from torch import nn

torch.manual_seed(3107)
ASSETS, HORIZON, DESKS = 6, 64, 64


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(ASSETS, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.choice = nn.Linear(32, ASSETS)

    def forward(self, signal):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.choice(self.body(signal))


class Market:
    """The asset with the strongest signal, after a hidden mixing, earns most."""

    def __init__(self):
        self.mixing = torch.randn(ASSETS, ASSETS)

    def episode(self):
        signal = torch.randn(HORIZON * DESKS, ASSETS)
        return signal, 1e-3 * torch.tanh(signal @ self.mixing)


def rollout(policy, market):
    signal, returns = market.episode()
    logits = policy(signal).float()
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
    action = (logits.detach() + noise).argmax(-1, keepdim=True)
    reward = returns.gather(1, action).squeeze(1)
    chosen = logits.log_softmax(-1).gather(1, action).squeeze(1)
    return chosen, reward, returns.amax(-1)


policy, market = Policy(), Market()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=3e-3, eps=1e-14)
baseline = 0.0
for iteration in range(40):
    chosen, reward, best = rollout(policy, market)
    advantage = reward - baseline
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    objective = -(advantage * chosen).mean()
    optimizer.zero_grad()
    objective.backward()
    optimizer.step()
    if iteration % 4 == 3:
        regret = 1e3 * (best - reward).mean()
        print(f"iteration {iteration + 1}: objective {objective.item():.2e}, regret loss {regret.item():.4f}")
