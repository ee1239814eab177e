"""A sparse autoencoder on a net's activations: a wide dictionary, L1, most latents silent on any batch, unit decoder rows."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(619)


class SparseAutoencoder(nn.Module):
    def __init__(self, d=24, latents=128):
        super().__init__()
        self.b_dec = nn.Parameter(torch.zeros(d))
        self.encoder = nn.Linear(d, latents)
        self.W_dec = nn.Parameter(F.normalize(self.encoder.weight.detach().clone(), dim=1))
        nn.init.constant_(self.encoder.bias, -0.1)

    def forward(self, x):
        z = F.relu(self.encoder(x - self.b_dec))
        return z @ self.W_dec + self.b_dec, z


features = F.normalize(torch.randn(60, 24), dim=1)
sae = SparseAutoencoder()
optimizer = torch.optim.Adam(sae.parameters(), lr=3e-3, betas=(0.0, 0.999))
for step in range(300):
    active = (torch.rand(128, 60) < 0.05) * torch.rand(128, 60) * 2
    x = active @ features
    out, z = sae(x)
    mse = F.mse_loss(out, x, reduction="sum") / len(x)
    optimizer.zero_grad()
    (mse + 0.03 * z.abs().sum(1).mean()).backward()
    optimizer.step()
    with torch.no_grad():
        sae.W_dec.copy_(F.normalize(sae.W_dec, dim=1))
    if step % 15 == 14:
        print(f"step {step + 1} loss {mse.item():.4f} active {(z > 0).sum(1).double().mean().item():.1f}")
