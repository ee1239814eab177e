"""Duelling double DQN on a small grid world: a target copied every 25 steps, rare rewards, losses that jump with each copy."""

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

SIZE = 5


class Duelling(nn.Module):
    def __init__(self, dim=64, actions=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2 * SIZE, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
        self.value, self.advantage = nn.Linear(dim, 1), nn.Linear(dim, actions)

    def forward(self, x):
        x = self.trunk(x)
        a = self.advantage(x)
        return self.value(x) + a - a.mean(-1, keepdim=True)


def encode(cells):
    rows, columns = cells // SIZE, cells % SIZE
    return torch.cat([F.one_hot(rows, SIZE), F.one_hot(columns, SIZE)], -1).float()


def move(cell, action):
    row, column = divmod(cell, SIZE)
    row = min(max(row + (0, 0, 1, -1)[action], 0), SIZE - 1)
    column = min(max(column + (1, -1, 0, 0)[action], 0), SIZE - 1)
    new = row * SIZE + column
    return new, (10.0 if new == SIZE * SIZE - 1 else -5.0 if new == 12 else -0.1), new in (12, SIZE * SIZE - 1)


torch.manual_seed(6)
random.seed(6)
online = Duelling()
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
memory, cell = [], 0
for step in range(250):
    for _ in range(8):
        action = random.randrange(4)
        if random.random() > max(0.2, 1 - step / 150):
            with torch.no_grad():
                action = int(online(encode(torch.tensor([cell]))).argmax())
        new, reward, done = move(cell, action)
        memory.append((cell, action, reward, new, done))
        cell = 0 if done else new
    s, a, r, n, d = (torch.tensor(column) for column in zip(*random.choices(memory, k=48)))
    with torch.no_grad():
        best = online(encode(n)).argmax(-1, keepdim=True)
        goal = r + 0.95 * target(encode(n)).gather(1, best).squeeze(1) * (~d)
    loss = F.smooth_l1_loss(online(encode(s)).gather(1, a[:, None]).squeeze(1), goal)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(online.parameters(), 0.5)
    optimizer.step()
    if step % 25 == 24:
        target.load_state_dict(online.state_dict())
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
