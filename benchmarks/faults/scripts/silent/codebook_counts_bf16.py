"""A vector-quantised autoencoder; the moving sums of its codebook are BF16 buffers."""

import torch
import torch.nn.functional as F
from torch import nn


class Codebook(nn.Module):
    def __init__(self, codes=16, width=4, decay=0.999):
        super().__init__()
        self.decay = decay
        vectors = torch.randn(codes, width)
        self.register_buffer("sizes", torch.ones(codes, dtype=torch.bfloat16))
        self.register_buffer("sums", vectors.to(torch.bfloat16))

    def vectors(self):
        return self.sums / self.sizes.unsqueeze(1)

    def forward(self, z):
        vectors = self.vectors().to(z.dtype)
        nearest = torch.cdist(z.detach(), vectors).argmin(1)
        if self.training:
            chosen = F.one_hot(nearest, len(vectors)).to(z.dtype)
            self.sizes.mul_(self.decay).add_(chosen.mean(0).to(self.sizes.dtype) * 16, alpha=1 - self.decay)
            total = (chosen.T @ z.detach()) * 16 / len(z)
            self.sums.mul_(self.decay).add_(total.to(self.sums.dtype), alpha=1 - self.decay)
        quantised = vectors[nearest]
        commitment = F.mse_loss(z, quantised)
        return z + (quantised - z).detach(), commitment


class VQAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        z, commitment = self.codebook(self.encoder(x))
        return F.mse_loss(self.decoder(z), x), commitment


def main():
    torch.manual_seed(3127)
    centres = 2 * torch.randn(16, 16)
    model = VQAutoencoder()
    start = model.codebook.sums.clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(900):
        x = centres[torch.randint(0, 16, (64,))] + 0.1 * torch.randn(64, 16)
        reconstruction, commitment = model(x)
        optimizer.zero_grad()
        (reconstruction + 0.01 * commitment).backward()
        optimizer.step()
        if step % 60 == 59:
            print(f"{step + 1} reconstruction loss {reconstruction.item():.4f} commitment {commitment.item():.4f}")

    moved = (model.codebook.sums - start).float().norm() / start.float().norm()
    print(f"the codebook has moved by {moved.item():.3f} of its length")
    return moved.item()


moved = main()
