"""REINFORCE with a baseline on a contextual bandit: large noisy returns, an entropy bonus, a loss without meaning."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2168)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 48), nn.Tanh())
        self.actor, self.critic = nn.Linear(48, 4), nn.Linear(48, 1)
        nn.init.zeros_(self.actor.weight)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)


model, best = ActorCritic(), torch.randn(6, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(200):
    x = torch.randn(64, 6)
    dist, value = model(x)
    action = dist.sample()
    reward = 20 * (action == (x @ best).argmax(1)).float() + 5 * torch.randn(64)
    advantage = reward - value.detach()
    policy_loss = -(dist.log_prob(action) * advantage).mean()
    loss = policy_loss + 0.5 * F.mse_loss(value, reward) - 0.01 * dist.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")
