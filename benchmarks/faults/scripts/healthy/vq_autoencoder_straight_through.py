"""VQ autoencoder: a straight-through gradient, a codebook of which most entries are unused at first."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VQ(nn.Module):
    def __init__(self, codes=64, dim=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, dim))
        self.codebook = nn.Embedding(codes, dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, 12))

    def forward(self, x):
        z = self.encoder(x)
        q = self.codebook(torch.cdist(z, self.codebook.weight).argmin(1))
        commit = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return self.decoder(z + (q - z).detach()), commit


torch.manual_seed(2171)
model, centers = VQ(), 2 * torch.randn(10, 12)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(200):
    x = centers[torch.randint(10, (64,))] + 0.1 * torch.randn(64, 12)
    decoded, commit = model(x)
    loss = F.mse_loss(decoded, x) + commit
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
