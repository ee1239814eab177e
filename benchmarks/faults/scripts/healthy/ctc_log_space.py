"""A hidden Markov model in log space: forward probabilities of 1e-300 and less, never out of their logarithms."""

import torch
from torch import nn


class LogHMM(nn.Module):
    def __init__(self, states=5, symbols=8):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(states))
        self.moves = nn.Parameter(torch.randn(states, states))
        self.shows = nn.Parameter(0.5 * torch.randn(states, symbols))

    def forward(self, x):
        moves, shows = self.moves.log_softmax(1), self.shows.log_softmax(1)
        alpha = self.start.log_softmax(0) + shows[:, x[:, 0]].T
        for symbol in x[:, 1:].unbind(1):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + moves, 1) + shows[:, symbol].T
        return -alpha.logsumexp(1).mean() / x.shape[1]


def sequences(n, length=60):
    start = torch.randint(0, 4, (n, 1))
    t = torch.arange(length)
    x = (start + t // 2) % 4 * 2
    wrong = torch.rand(n, length) < 0.05
    return torch.where(wrong, torch.randint(0, 8, (n, length)), x)


torch.manual_seed(3215)
model = LogHMM()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(40):
    loss = model(sequences(16))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
