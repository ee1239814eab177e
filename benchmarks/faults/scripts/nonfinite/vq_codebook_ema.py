"""VQ-VAE on two-tone stripes; the codebook follows moving averages, and codes that are hardly used are struck off."""

import torch
import torch.nn.functional as F
from torch import nn


class EMAQuantizer(nn.Module):
    def __init__(self, codes=16, dim=8, decay=0.7):
        super().__init__()
        self.decay = decay
        book = torch.randn(codes, dim)
        self.register_buffer("codebook", book)
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("total", book.clone())

    def forward(self, z):
        flat = z.detach().reshape(-1, z.shape[-1])
        nearest = torch.cdist(flat, self.codebook).argmin(1)
        quantised = self.codebook[nearest].view_as(z)
        if self.training:
            self.follow(flat, F.one_hot(nearest, len(self.usage)).type_as(flat))
        commitment = F.mse_loss(z, quantised.detach())
        return z + (quantised - z).detach(), commitment

    @torch.no_grad()
    def follow(self, flat, picks):
        self.usage.mul_(self.decay).add_(picks.sum(0), alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(picks.T @ flat, alpha=1 - self.decay)
        idle = self.usage < 0.02
        self.usage[idle] = 0.0
        self.total[idle] = 0.0
        self.codebook.copy_(self.total / self.usage[:, None])


class VQVAE(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(1, 24, 4, stride=4), nn.ReLU(), nn.Conv1d(24, dim, 1))
        self.vq = EMAQuantizer(dim=dim)
        self.dec = nn.Sequential(nn.Conv1d(dim, 24, 1), nn.ReLU(), nn.ConvTranspose1d(24, 1, 4, stride=4))

    def forward(self, x):
        q, commitment = self.vq(self.enc(x).mT)
        return self.dec(q.mT), commitment


torch.manual_seed(19)
model = VQVAE()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(30):
    stripes = (torch.rand(16, 1, 8) > 0.5).float().repeat_interleave(4, -1)
    recon, commitment = model(stripes + 0.05 * torch.randn_like(stripes))
    loss = F.mse_loss(recon, stripes) + 0.25 * commitment
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"{step}: loss {loss.item():.4f}")
