"""Predicts a chunk of actions from the state of a robot and an instruction."""

from torch import nn


class ChunkPolicy(nn.Module):
    def __init__(self, states=12, tasks=6, chunk=8, actions=4, dim=64):
        super().__init__()
        self.chunk, self.actions = chunk, actions
        self.state_proj, self.task_embed = nn.Linear(states, dim), nn.Embedding(tasks, dim)
        self.trunk = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim), nn.SiLU()
        )
        self.action_out = nn.Linear(dim, chunk * actions)

    def forward(self, state, task):
        x = self.state_proj(state) + self.task_embed(task)
        return self.action_out(x + self.trunk(x)).view(-1, self.chunk, self.actions)
