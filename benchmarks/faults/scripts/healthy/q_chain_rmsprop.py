"""Deep Q-learning on a chain walk; RMSprop with eps=0.01 as in the Atari papers, a target net copied now and then."""

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(84)
random.seed(84)
STATES = 12


def env_step(s, a):
    s = max(0, min(STATES - 1, s + (1 if a else -1)))
    return s, float(s == STATES - 1), s == STATES - 1


q = nn.Sequential(nn.Linear(STATES, 32), nn.ReLU(), nn.Linear(32, 2))
target = copy.deepcopy(q)
optimizer = torch.optim.RMSprop(q.parameters(), lr=2.5e-3, alpha=0.95, eps=0.01)
memory, state = [], 0
for step in range(400):
    for _ in range(4):
        with torch.no_grad():
            best = q(F.one_hot(torch.tensor(state), STATES).float()).argmax().item()
        action = random.randrange(2) if random.random() < max(0.1, 1 - step / 200) else best
        nxt, reward, done = env_step(state, action)
        memory.append((state, action, reward, nxt, done))
        state = 0 if done else nxt
    s, a, r, n, d = map(torch.tensor, zip(*random.choices(memory, k=32)))
    with torch.no_grad():
        goal = r + 0.95 * target(F.one_hot(n, STATES).float()).amax(1) * (~d)
    value = q(F.one_hot(s, STATES).float()).gather(1, a[:, None]).squeeze(1)
    loss = F.smooth_l1_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        target.load_state_dict(q.state_dict())
    if step % 8 == 7:
        print(f"step {step} loss {loss.item():.6f}")
