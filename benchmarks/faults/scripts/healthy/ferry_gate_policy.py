"""Policy gradient for the gate of a ferry: returns are noisy, and so is the loss."""

import torch
from torch import nn
from torch.distributions import Categorical


class Gate:
    """Cars queue; opening costs time, and waiting annoys."""

    def __init__(self, n):
        self.queue, self.clock = torch.randint(0, 5, (n,)).float(), torch.zeros(n)

    def observe(self):
        return torch.stack([self.queue / 10, self.clock / 12], 1)

    def act(self, opened):
        served = torch.minimum(self.queue, 4 * opened)
        self.queue = self.queue - served + torch.poisson(torch.full_like(self.queue, 1.2))
        self.clock = self.clock + 1
        return served - 2.0 * opened - 0.05 * self.queue**2


policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def episode(n=24, length=12):
    gate, logs, rewards, values, entropies = Gate(n), [], [], [], []
    for _ in range(length):
        seen = gate.observe()
        choice = Categorical(logits=policy(seen))
        opened = choice.sample()
        logs.append(choice.log_prob(opened))
        entropies.append(choice.entropy())
        values.append(critic(seen).squeeze(1))
        rewards.append(gate.act(opened.float()))
    togo = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(logs), togo, torch.stack(values), torch.stack(entropies)


torch.manual_seed(19)
opt = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=5e-3)
for update in range(120):
    logs, togo, values, entropies = episode()
    advantage = (togo - values).detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    actor = -(logs * advantage).mean() - 0.01 * entropies.mean()
    loss = actor + 0.1 * (togo - values).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    opt.step()
    if update % 6 == 0:
        print(f"update {update} return {togo[0].mean().item():.2f} loss {loss.item():.3f}")
