"""A neural hidden Markov model in log space: impossible transitions are -inf throughout, and that is right."""

import torch
from torch import nn


class LeftToRightHMM(nn.Module):
    """States can only stay or move on by one."""

    def __init__(self, states=5, features=4):
        super().__init__()
        self.stay = nn.Parameter(torch.zeros(states))
        self.emit = nn.Sequential(nn.Linear(features, 24), nn.Tanh(), nn.Linear(24, states))

    def forward(self, x):
        emission = self.emit(x).log_softmax(1)  # over time: where in the utterance is each state at home
        stay, move = nn.functional.logsigmoid(self.stay), nn.functional.logsigmoid(-self.stay)
        nowhere = torch.full((len(x), 1), float("-inf"))
        alpha = emission[:, 0, :1]  # starts in the first state
        for t in range(1, x.size(1)):
            here = alpha.size(1)
            stayed = torch.cat([alpha + stay[:here], nowhere], 1)
            moved = torch.cat([nowhere, alpha + move[:here]], 1)
            alpha = torch.logaddexp(stayed, moved)[:, : len(stay)] + emission[:, t, : here + 1]
        return -alpha[:, -1].mean() / x.size(1)


torch.manual_seed(0)
model = LeftToRightHMM()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(8, 10, 4) + torch.linspace(0, 3, 10)[:, None]
    loss = model(x)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 3 == 0:
        print(step, loss.item())
