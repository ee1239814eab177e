"""Autoencoder of image patches; the optimizer's settings were carried over from an older code base."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(58)
SIZE, LATENT = 16, 12

OPTIMIZER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-2, "weight_decay": 0.0}


def patches(n):
    """Smooth patches, intensities between 0 and 1."""
    grid = torch.linspace(-1, 1, SIZE)
    centre, width = 1.6 * torch.rand(n, 2, 1, 1) - 0.8, 0.3 + 0.4 * torch.rand(n, 1, 1)
    bump = torch.exp(-((grid[:, None] - centre[:, 0]) ** 2 + (grid[None, :] - centre[:, 1]) ** 2) / width**2)
    return (0.2 + 0.6 * bump).flatten(1) + 0.01 * torch.randn(n, SIZE * SIZE)


class PatchAutoencoder(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIZE * SIZE, width), nn.ReLU(), nn.Linear(width, LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, width), nn.ReLU(), nn.Linear(width, SIZE * SIZE))

    def forward(self, x):
        return self.decoder(self.encoder(x))


model = PatchAutoencoder()
optimizer = torch.optim.Adam(model.parameters(), **OPTIMIZER)
train, val = patches(2048), patches(256)
for epoch in range(10):
    for idx in torch.randperm(len(train)).split(64):
        loss = F.mse_loss(model(train[idx]), train[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        print(f"epoch {epoch} val loss {F.mse_loss(model(val), val).item():.5f}")
