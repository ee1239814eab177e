"""VQ autoencoder of texture patches; the codebook follows the encoder by exponential averages (no gradient)."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(303)
K, DIM, PIX = 32, 8, 36
atoms = torch.randn(32, PIX)


def patches(n):
    return atoms[torch.randint(32, (n,))] * (0.9 + 0.2 * torch.rand(n, 1)) + 0.1 * torch.randn(n, PIX)


class Quantizer(nn.Module):
    def __init__(self, dtype, decay=0.998):
        super().__init__()
        self.decay = decay
        self.register_buffer("code", torch.randn(K, DIM).to(dtype))
        self.register_buffer("size", torch.ones(K, dtype=dtype))
        self.register_buffer("total", self.code.clone())

    def forward(self, z):
        idx = torch.cdist(z, self.code.float()).argmin(1)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(idx, K).to(self.size.dtype)
                self.size.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(one_hot.T @ z.to(self.total.dtype), alpha=1 - self.decay)
                self.code.copy_(self.total / self.size.clamp(min=1e-3)[:, None])
        q = self.code[idx].float()
        return z + (q - z).detach(), F.mse_loss(z, q.detach())


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(PIX, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.vq = Quantizer(torch.float32)
        self.dec = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, PIX))

    def forward(self, x):
        q, commit = self.vq(self.enc(x))
        return self.dec(q), commit


model = VQVAE()

opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(200):
    x = patches(64)
    rec, commit = model(x)
    loss = F.mse_loss(rec, x)
    opt.zero_grad()
    (loss + 0.25 * commit).backward()
    opt.step()
    if step % 4 == 3:
        print(f"step {step} loss {loss.item():.4f} commit {commit.item():.4f}")
