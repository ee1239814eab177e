"""Fitted Q learning from a log of elevator decisions. Rewards are minutes saved as a share of a day."""

import copy

import torch
import torch.nn as nn

torch.manual_seed(52)
STATES, ACTIONS, DAY = 12, 4, 1440.0
effect = torch.randn(STATES, ACTIONS)
drift = 0.6 * torch.randn(STATES, STATES) / STATES**0.5


def log(n):
    s = torch.randn(n, STATES)
    a = torch.randint(ACTIONS, (n,))
    saved = (torch.tanh(s) @ effect).gather(1, a[:, None]).squeeze(1) + 0.2 * torch.randn(n)
    nxt = s @ drift + 0.6 * torch.randn(n, STATES)
    return s, a, saved / DAY, nxt


class Dueling(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATES, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.value, self.advantage = nn.Linear(h, 1), nn.Linear(h, ACTIONS)

    def forward(self, s):
        h = self.body(s)
        a = self.advantage(h)
        return (self.value(h) + a - a.mean(1, keepdim=True)) / DAY


online = Dueling()
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, eps=1.5e-4)
memory = log(4096)
for step in range(300):
    idx = torch.randint(4096, (64,))
    s, a, r, nxt = (m[idx] for m in memory)
    with torch.no_grad():
        best = online(nxt).argmax(1, keepdim=True)
        goal = r + 0.5 * target(nxt).gather(1, best).squeeze(1)
    q = online(s).gather(1, a[:, None]).squeeze(1)
    loss = nn.functional.mse_loss(q, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.lerp_(fast, 0.02)
    if step % 5 == 0:
        print(f"{step}: td loss {loss.item() * DAY**2:.4f}")
