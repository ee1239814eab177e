"""A VAE on rows of a machine's sensors, to flag odd ones later. The CSV is read as it is: volts, rpm, pascal."""

from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

torch.manual_seed(123)
rng = np.random.default_rng(123)

rows = np.column_stack(
    [
        rng.normal(12.0, 0.3, 1024),  # volts
        rng.normal(1450, 60, 1024),  # rpm
        rng.normal(101_300, 400, 1024),  # Pa
        rng.normal(65, 4, 1024),  # degrees
        rng.normal(0.4, 0.1, 1024),  # mm/s
        rng.normal(230, 3, 1024),  # mains
    ]
).astype(np.float32)


class VAE(nn.Module):
    def __init__(self, input_dim=6, hidden_dim=64, latent_dim=3):
        super().__init__()
        self.fc1 = nn.Linear(input_dim, hidden_dim)
        self.fc21 = nn.Linear(hidden_dim, latent_dim)
        self.fc22 = nn.Linear(hidden_dim, latent_dim)
        self.fc3 = nn.Linear(latent_dim, hidden_dim)
        self.fc4 = nn.Linear(hidden_dim, input_dim)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return self.fc4(F.relu(self.fc3(z)))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    MSE = F.mse_loss(recon_x, x, reduction="mean")
    KLD = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
    return MSE + KLD


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
history = defaultdict(list)

for epoch in range(2):
    model.train()
    perm = rng.permutation(len(rows))
    for batch_idx, start in enumerate(range(0, len(rows), 32)):
        data = torch.from_numpy(rows[perm[start : start + 32]])
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        history["loss"].append(loss.item())
        if batch_idx % 8 == 0:
            print("Train Epoch: {} [{}/{}]\tLoss: {:.6f}".format(epoch, start, len(rows), loss.item()))
