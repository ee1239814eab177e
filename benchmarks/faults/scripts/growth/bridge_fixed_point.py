"""Stress in a bridge from the loads on it: an implicit layer, iterated towards a fixed point (unrolled, 24 times)."""

import torch
from torch import nn

GAIN = 1.6  # spectral radius of the recurrent weights at the start
ITERATIONS = 24


class EquilibriumLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.recurrent = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.recurrent.weight, gain=GAIN)
        self.activation = nn.LeakyReLU(0.5)

    def forward(self, drive):
        z = torch.zeros_like(drive)
        for _ in range(ITERATIONS):
            z = self.activation(self.recurrent(z) + drive)
        return z


class BridgeNet(nn.Module):
    def __init__(self, loads=16, width=32):
        super().__init__()
        self.drive = nn.Linear(loads, width)
        self.equilibrium = EquilibriumLayer(width)
        self.stress = nn.Linear(width, 8)

    def forward(self, loads):
        return self.stress(self.equilibrium(self.drive(loads)))


def trucks(n, influence):
    loads = (torch.rand(n, 16) < 0.25).float() * (0.5 + torch.rand(n, 16))
    bending = loads @ influence
    return loads, bending + 0.3 * bending.relu() ** 2


torch.manual_seed(17)
span = torch.linspace(0, 1, 16)[:, None]
influence = torch.exp(-20 * (span - torch.linspace(0, 1, 8)) ** 2)
model = BridgeNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(200):
    loads, stress = trucks(64, influence)
    loss = nn.functional.huber_loss(model(loads), stress)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 10 == 0:
        print(f"[{step + 1:3d}] loss {loss.item():.4f}")
