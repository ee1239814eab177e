"""Harvest policy through a differentiable fish population (a logistic map); the horizon grows, the gradient with it."""

import torch
from torch import nn

CLIP = float("inf")


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(2, 16)
        self.effort = nn.Linear(16, 1)

    def forward(self, state):
        return 0.1 * torch.sigmoid(self.effort(torch.tanh(self.hidden(state)))).squeeze(-1)


def rollout(policy, stock, horizon):
    gain = 0.0
    for t in range(horizon):
        season = torch.full_like(stock, (t % 4) / 4)
        catch = policy(torch.stack([stock, season], -1)) * stock
        stock = stock - catch
        stock = 3.95 * stock * (1 - stock)
        gain = gain + catch
    return gain / horizon, stock


torch.manual_seed(92)
policy = Policy()
optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
for step in range(50):
    horizon = 6 if step < 20 else 14 if step < 38 else 60
    catch, left = rollout(policy, torch.rand(24) * 0.6 + 0.2, horizon)
    loss = -catch.mean() + (left - 0.5).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
    optimizer.step()
    print(f"step {step} horizon {horizon} loss {loss.item():.4f}")
