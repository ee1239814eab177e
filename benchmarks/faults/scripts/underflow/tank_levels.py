"""Predicts the next level of storage tanks in centimetres with an Elman network."""

import torch
from torch import nn


class TankNet(nn.Module):
    def __init__(self, tanks=6, hidden=40):
        super().__init__()
        self.cell = nn.RNN(tanks, hidden, batch_first=True)
        self.readout = nn.Linear(hidden, tanks)

    def forward(self, levels):
        states, _ = self.cell(levels)
        return self.readout(states[:, -1])


class Depot:
    CAPACITY = 900.0

    def __init__(self, tanks=6):
        self.period = 20 + 30 * torch.rand(tanks)
        self.phase = 6.28 * torch.rand(tanks)

    def windows(self, n, length=24):
        start = torch.randint(10_000, (n, 1, 1))
        time = start + torch.arange(length + 1)[None, :, None]
        wave = torch.sin(6.28 * time / self.period + self.phase)
        level = self.CAPACITY * (0.55 + 0.35 * wave) + 5 * torch.randn(n, length + 1, 6)
        return level[:, :-1], level[:, -1]


class Loop:
    def __init__(self, model, depot, lr=3e-3):
        self.model, self.depot = model, depot
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def run(self, steps):
        for step in range(steps):
            levels, nxt = self.depot.windows(32)
            predicted = Depot.CAPACITY * self.model(levels)
            loss = ((predicted - nxt) / 100).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % 5 == 0:
                print(f"iteration {step} loss {loss.item():.4f}")


torch.manual_seed(137)
Loop(TankNet(), Depot()).run(300)
