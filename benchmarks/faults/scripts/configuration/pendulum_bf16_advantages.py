"""A policy gradient whose returns are some 3000 and whose critic is good; their difference is taken in BF16."""

import torch
from torch import nn

ACTIONS, STATES = 5, 6


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(STATES, 32), nn.Tanh(), nn.Linear(32, ACTIONS))

    def forward(self, state):
        return self.actor(state).log_softmax(-1)


class Arena:
    offset = 3000.0

    def __init__(self):
        self.best = torch.randn(STATES, ACTIONS)

    def value(self, state):
        return self.offset + state.sum(-1)

    def play(self, agent, n=256):
        state = torch.randn(n, STATES)
        log_p = agent(state)
        noise = -torch.log(-torch.log(torch.rand(n, ACTIONS).clamp(1e-6, 1 - 1e-6)))
        action = (log_p.detach() + noise).argmax(-1, keepdim=True)
        gain = torch.tanh(state @ self.best)
        returns = self.value(state) + gain.gather(1, action).squeeze(1)
        lost = (gain.amax(1) - gain.gather(1, action).squeeze(1)).mean()
        return state, log_p.gather(1, action).squeeze(1), returns, lost


def improve(agent, arena, optimizer):
    state, log_p, returns, lost = arena.play(agent)
    advantage = returns.to(torch.bfloat16) - arena.value(state).to(torch.bfloat16)
    objective = -(advantage.to(log_p.dtype) * log_p).mean()
    optimizer.zero_grad()
    objective.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
    optimizer.step()
    return lost.item(), advantage


torch.manual_seed(3139)
agent, arena = Agent(), Arena()
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
for iteration in range(80):
    regret, advantage = improve(agent, arena, optimizer)
    if iteration % 8 == 7:
        print(f"iteration {iteration + 1}: regret loss {regret:.4f}")
