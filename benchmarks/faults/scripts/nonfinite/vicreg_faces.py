"""Self-supervised face embeddings with a variance-invariance-covariance loss."""

import torch
from torch import nn
from torch.nn import functional as F


class Embedder(nn.Module):
    def __init__(self, out=48):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16 * 16, 64)
        self.expand = nn.Linear(64, out)
        nn.init.zeros_(self.expand.weight)  # like the last layer of a residual branch

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.expand(F.relu(self.fc(x.flatten(1))))


def off_diagonal(m):
    return m[~torch.eye(len(m), dtype=torch.bool)]


def variance_term(z):
    std = torch.sqrt(z.var(dim=0))
    return F.relu(1 - std).mean()


def covariance_term(z):
    z = z - z.mean(0)
    return off_diagonal(z.T @ z / (len(z) - 1)).square().sum() / z.size(1)


def vicreg(a, b):
    return 25 * F.mse_loss(a, b) + 25 * (variance_term(a) + variance_term(b)) + covariance_term(a) + covariance_term(b)


torch.manual_seed(12)
embedder = Embedder()
optimizer = torch.optim.AdamW(embedder.parameters(), lr=1e-2)
faces = torch.rand(48, 1, 16, 16)
for epoch in range(4):
    for index in torch.randperm(48).split(16):
        batch = faces[index]
        loss = vicreg(embedder(batch + 0.1 * torch.randn_like(batch)), embedder(batch.flip(-1)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")
