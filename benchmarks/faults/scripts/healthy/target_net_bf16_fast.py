"""Fitted Q iteration; the target network is a BF16 average that takes a fifth of the online network in every step."""

import copy

import torch
from torch import nn


class QNetwork(nn.Module):
    def __init__(self, states=4, actions=3, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(states, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, actions)

    def forward(self, x):
        return self.head(self.body(x))


class Target:
    def __init__(self, online, tau, dtype=torch.bfloat16):
        self.network = copy.deepcopy(online).to(dtype).requires_grad_(False)
        self.tau, self.dtype = tau, dtype

    def follow(self, online):
        with torch.no_grad():
            for slow, fast in zip(self.network.parameters(), online.parameters()):
                slow.lerp_(fast.to(self.dtype), self.tau)

    def value(self, state):
        with torch.no_grad():
            return self.network(state.to(self.dtype)).to(torch.float32).amax(1)


class Drift:
    """A point that is pushed left, nowhere or right; reward is high near the origin."""

    def __init__(self):
        self.push = torch.tensor([[-0.5], [0.0], [0.5]]) * torch.ones(3, 4)

    def transitions(self, n):
        state = torch.randn(n, 4)
        action = torch.randint(3, (n,))
        after = 0.9 * state + self.push[action] + 0.05 * torch.randn(n, 4)
        return state, action, 1.0 - after.square().mean(1), after


def main():
    torch.manual_seed(21104)
    online, world = QNetwork(), Drift()
    target = Target(online, tau=0.2)
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)
    for step in range(80):
        state, action, reward, after = world.transitions(128)
        wanted = reward + 0.5 * target.value(after)
        q = online(state).gather(1, action[:, None]).squeeze(1)
        loss = nn.functional.mse_loss(q, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        target.follow(online)
        if step % 2 == 0:
            print(f"update {step} td_loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
