"""Q-learning on a corridor with a target network that is copied every ten steps: the loss jumps with every copy."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

CELLS, GAMMA = 10, 0.9
torch.manual_seed(3236)
q = nn.Sequential(nn.Linear(CELLS, 48), nn.ReLU(), nn.Linear(48, 2))
target = copy.deepcopy(q)
optimizer = torch.optim.Adam(q.parameters(), lr=5e-3)
exact = GAMMA ** torch.arange(CELLS - 2, -1, -1)


def moves(n):
    here = torch.randint(0, CELLS - 1, (n,))
    action = torch.randint(0, 2, (n,))
    there = (here + 2 * action - 1).clamp(min=0)
    return here, action, there, (there == CELLS - 1)


def code(cell):
    return F.one_hot(cell, CELLS) * 1.0


for step in range(150):
    here, action, there, done = moves(64)
    with torch.no_grad():
        goal = done * 1.0 + GAMMA * ~done * target(code(there)).amax(1)
    td = F.smooth_l1_loss(q(code(here)).gather(1, action.unsqueeze(1)).squeeze(1), goal)
    optimizer.zero_grad()
    td.backward()
    optimizer.step()
    if step % 10 == 9:
        target.load_state_dict(q.state_dict())
        with torch.no_grad():
            loss = (q(code(torch.arange(CELLS - 1))).amax(1) - exact).square().mean()
        print(f"step {step} td {td.item():.2e} value loss {loss.item():.4f}")
