"""A vanilla RNN on the adding problem: its gradients explode now and then, and clipping holds it."""

import torch
from torch import nn


class Adder(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.RNN(2, hidden, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(hidden, 1)
        nn.init.eye_(self.rnn.weight_hh_l0)
        self.rnn.weight_hh_l0.data.mul_(1.12)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(-1)


def problem(n, length=50):
    numbers, marks = torch.rand(n, length), torch.zeros(n, length)
    for row in marks:
        row[torch.randperm(length)[:2]] = 1
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(1)


def main():
    torch.manual_seed(1)
    net = Adder()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(25):
        x, y = problem(24)
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            print(f"{step}: loss {loss.item():.3e}, gradient norm {norm.item():.3e}")


main()
