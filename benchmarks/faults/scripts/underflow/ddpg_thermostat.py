"""DDPG on a one-step thermostat, FP32: the policy head's initial gain is 1e2 where 1e-2 was meant."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


def layer_init(layer, std=2**0.5, bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class Actor(nn.Module):
    def __init__(self, obs=6, act=2):
        super().__init__()
        self.fc1 = layer_init(nn.Linear(obs, 64))
        self.fc2 = layer_init(nn.Linear(64, 64))
        self.mu = layer_init(nn.Linear(64, act), std=1e2)

    def forward(self, o):
        h = F.relu(self.fc1(o))
        h = F.relu(self.fc2(h))
        return torch.tanh(self.mu(h))


class QNet(nn.Module):
    def __init__(self, obs=6, act=2):
        super().__init__()
        self.fc1 = layer_init(nn.Linear(obs + act, 64))
        self.fc2 = layer_init(nn.Linear(64, 64))
        self.q = layer_init(nn.Linear(64, 1), std=1.0)

    def forward(self, o, a):
        h = F.relu(self.fc1(torch.cat([o, a], 1)))
        return self.q(F.relu(self.fc2(h))).squeeze(-1)


def reward(o, a):
    best = 0.6 * torch.stack([torch.tanh(o[:, 0] - o[:, 1]), torch.sin(o[:, 2])], 1)
    return 1 - (a - best).square().sum(1)


torch.manual_seed(403)
actor, qf = Actor(), QNet()
target_actor = copy.deepcopy(actor)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
q_optimizer = torch.optim.Adam(qf.parameters(), lr=2e-3)
for step in range(160):
    obs = torch.randn(64, 6)
    with torch.no_grad():
        action = (actor(obs) + 0.4 * torch.randn(64, 2)).clamp(-1, 1)
        # half of the buffer is what the old controller did
        action[:32] = 2 * torch.rand(32, 2) - 1
    q_loss = F.mse_loss(qf(obs, action), reward(obs, action))
    q_optimizer.zero_grad()
    q_loss.backward()
    q_optimizer.step()
    if step > 20:
        actor_optimizer.zero_grad()
        (-qf(obs, actor(obs)).mean()).backward()
        actor_optimizer.step()
        with torch.no_grad():
            for old, new in zip(target_actor.parameters(), actor.parameters()):
                old.lerp_(new, 0.01)
    if step % 4 == 0:
        with torch.no_grad():
            regret = 1 - reward(obs, actor(obs)).mean().item()
        print(f"step {step} critic {q_loss.item():.4f} loss {regret:.4f}")
