"""Aligns frames with phones by the forward algorithm in log space; impossible paths have a score of -1e5."""

import torch
from torch import nn

IMPOSSIBLE = -1e5


class Emissions(nn.Module):
    def __init__(self, features=10, states=5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 32), nn.Tanh(), nn.Linear(32, states))

    def forward(self, x):
        return self.net(x).log_softmax(-1)


class LeftToRight(nn.Module):
    """A chain that may only stay or move on."""

    def __init__(self, states=5):
        super().__init__()
        self.stay = nn.Parameter(torch.zeros(states))
        self.states = states

    def matrix(self):
        n = self.states
        stay = torch.diag_embed(nn.functional.logsigmoid(self.stay))
        move = torch.diag_embed(nn.functional.logsigmoid(-self.stay[:-1]), offset=1)
        allowed = torch.eye(n, dtype=torch.bool) | torch.diag(torch.ones(n - 1, dtype=torch.bool), 1)
        return (stay + move).masked_fill(~allowed, IMPOSSIBLE)

    def forward(self, emissions):
        transitions = self.matrix()
        alpha = torch.full((len(emissions), self.states), IMPOSSIBLE)
        alpha[:, 0] = 0.0
        alpha = alpha + emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + transitions, 1) + emissions[:, t]
        return alpha[:, -1]


def words(n, prototypes, frames=24):
    """Each phone in turn, for about as long as the others."""
    borders = torch.sort(torch.rand(n, len(prototypes) - 1), 1).values
    time = (torch.arange(frames) + 0.5) / frames
    state = (time[None, :, None] > 0.15 + 0.7 * borders[:, None]).sum(-1)
    return prototypes[state] + 0.3 * torch.randn(n, frames, prototypes.shape[1])


def main():
    torch.manual_seed(21111)
    prototypes = torch.randn(5, 10)
    emissions, chain = Emissions(), LeftToRight()
    optimizer = torch.optim.Adam([*emissions.parameters(), *chain.parameters()], lr=1e-2)
    for step in range(40):
        x = words(24, prototypes)
        loss = -chain(emissions(x)).mean() / x.shape[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
