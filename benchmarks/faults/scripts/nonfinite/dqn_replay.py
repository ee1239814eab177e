"""DQN on a corridor with prioritised replay."""

import random

import torch
from torch import nn

LENGTH = 6


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(LENGTH, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, s):
        return self.layers(s)


class PrioritizedReplay:
    def __init__(self, alpha=0.6, beta=0.5):
        self.items, self.priorities, self.alpha, self.beta = [], [], alpha, beta

    def add(self, transition):
        self.items.append(transition)
        self.priorities.append(max(self.priorities, default=1.0))

    def sample(self, rng, n):
        # half by priority, half uniformly so that nothing is forgotten
        weights = [p**self.alpha for p in self.priorities]
        index = rng.choices(range(len(self.items)), weights, k=n // 2) + rng.choices(range(len(self.items)), k=n // 2)
        return index, torch.tensor([weights[i] / sum(weights) for i in index]) * len(self.items)

    def update(self, index, errors):
        for i, e in zip(index, errors.tolist()):
            self.priorities[i] = 0.0 if e < 1e-3 else e


def onehot(i):
    return torch.eye(LENGTH)[i]


def walk(rng, memory, steps):
    position = 0
    for _ in range(steps):
        action = rng.randrange(2)
        following = max(0, min(LENGTH - 1, position + (1 if action else -1)))
        done = following == LENGTH - 1
        memory.add((position, action, float(done), following, done))
        position = 0 if done else following


def main():
    torch.manual_seed(0)
    rng = random.Random(0)
    q, target = QNet(), QNet()
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=5e-3)
    memory = PrioritizedReplay()
    walk(rng, memory, 60)
    for step in range(40):
        index, probability = memory.sample(rng, 16)
        s, a, r, s2, done = zip(*(memory.items[i] for i in index))
        chosen = q(onehot(list(s))).gather(1, torch.tensor(a)[:, None]).squeeze(1)
        with torch.no_grad():
            wanted = torch.tensor(r) + 0.9 * target(onehot(list(s2))).amax(1) * (1 - torch.tensor(done).float())
        error = wanted - chosen
        importance = probability**-memory.beta
        loss = (importance * error.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.update(index, error.detach().abs())
        if step % 10 == 0:
            target.load_state_dict(q.state_dict())
            print(f"step {step}: loss {loss.item():.5f}")


main()
