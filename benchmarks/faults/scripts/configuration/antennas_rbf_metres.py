"""Field strength around radio antennas: an RBF layer over positions in metres of the national grid."""

import torch
import torch.nn as nn

CENTRES = 48


def pairwise_sq(a, b):
    return a.pow(2).sum(1, keepdim=True) + b.pow(2).sum(1) - 2 * a @ b.T


class RBFLayer(nn.Module):
    def __init__(self, centres, width):
        super().__init__()
        self.register_buffer("centres", centres)
        self.log_gamma = nn.Parameter(torch.full((len(centres),), -2.0).sub(width).exp().log())

    def forward(self, x):
        d2 = pairwise_sq(x, self.centres).clamp(min=0)
        return torch.exp(-self.log_gamma.exp() * d2)


class FieldNet(nn.Module):
    def __init__(self, centres):
        super().__init__()
        self.rbf = RBFLayer(centres, 6.0)
        self.fc1, self.fc2 = nn.Linear(CENTRES, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.rbf(x)))).squeeze(1)


def measure(n):
    near = torch.randint(CENTRES, (n,))
    offset = 60 * torch.randn(n, 2)
    xy = antennas[near] + offset
    strength = (power[near] * torch.exp(-offset.square().sum(1) / 5000)).float()
    return xy, strength


torch.manual_seed(433)
origin = torch.tensor([612_000.0, 5_340_000.0])  # easting, northing
antennas = origin + 3000 * torch.rand(CENTRES, 2)
power = 1 + torch.rand(CENTRES)
model = FieldNet(antennas)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(250):
    xy, strength = measure(128)
    loss = nn.functional.mse_loss(model(xy), strength)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.5f}")
