"""Redshift of quasars; luminosities come in erg/s, up to 1e36 here, and are only ever used through their logarithm."""

import torch
from torch import nn


class QuasarNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("reference", torch.tensor(1e33))
        self.net = nn.Sequential(nn.Linear(5, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))

    def forward(self, luminosity):
        return self.net((luminosity / self.reference).log10()).squeeze(-1)


def catalogue(n):
    magnitude = torch.randn(n, 5)
    redshift = torch.sin(magnitude[:, 0] - magnitude[:, 1]) + 0.5 * magnitude[:, 2].tanh() * magnitude[:, 4]
    return 1e33 * 10**magnitude, redshift


torch.manual_seed(107)
model = QuasarNet()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(250):
    luminosity, redshift = catalogue(128)
    loss = nn.functional.mse_loss(model(luminosity), redshift)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
