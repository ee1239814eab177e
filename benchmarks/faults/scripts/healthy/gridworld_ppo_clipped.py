"""PPO on a small corridor; many ratios are clipped and then have no gradient, advantages are normalised."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(609)
CELLS, ACTIONS = 10, 3


class ActorCritic(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(CELLS, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, ACTIONS), nn.Linear(width, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.actor(h).log_softmax(-1), self.critic(h).squeeze(-1)


model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
for update in range(30):
    cell = torch.randint(CELLS, (256,))
    obs = F.one_hot(cell, CELLS).to(torch.get_default_dtype())
    with torch.no_grad():
        logp_old, value = model(obs)
    action = torch.multinomial(logp_old.exp(), 1).squeeze(1)
    reward = (action == cell % ACTIONS).to(obs.dtype) - 0.1 * action
    advantage = reward - value
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    old = logp_old.gather(1, action[:, None]).squeeze(1)
    for _ in range(6):
        logp, value = model(obs)
        ratio = (logp.gather(1, action[:, None]).squeeze(1) - old).exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage).mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        optimizer.zero_grad()
        (policy + 0.5 * F.mse_loss(value, reward) - 0.005 * entropy).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    print(f"update {update} regret loss {1 - reward.mean().item():.4f} entropy {entropy.item():.3f}")
