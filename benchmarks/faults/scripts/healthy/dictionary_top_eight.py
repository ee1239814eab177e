"""A sparse autoencoder: 8 of 256 latents are kept for each sample, so most activations and gradients are zero."""

import torch
from torch import nn


class TopKAutoencoder(nn.Module):
    def __init__(self, dim=32, latents=256, k=8):
        super().__init__()
        self.k = k
        self.bias = nn.Parameter(torch.zeros(dim))
        self.encoder = nn.Linear(dim, latents)
        self.decoder = nn.Linear(latents, dim, bias=False)
        with torch.no_grad():
            self.decoder.weight.copy_(self.encoder.weight.t())

    def forward(self, x):
        pre = self.encoder(x - self.bias)
        top = pre.topk(self.k, -1)
        z = torch.zeros_like(pre).scatter(-1, top.indices, torch.relu(top.values))
        return self.decoder(z) + self.bias, z


def activations(n, atoms, sparsity=5):
    code = torch.zeros(n, len(atoms)).scatter(1, torch.rand(n, len(atoms)).topk(sparsity).indices, 1.0)
    return (code * torch.rand(n, len(atoms))) @ atoms


torch.manual_seed(104)
atoms = nn.functional.normalize(torch.randn(64, 32), dim=1)
sae = TopKAutoencoder()
optimizer = torch.optim.Adam(sae.parameters(), lr=2e-3, betas=(0.9, 0.999))
alive = torch.zeros(256, dtype=torch.bool)
for step in range(200):
    x = activations(256, atoms)
    recon, z = sae(x)
    loss = (recon - x).square().sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        sae.decoder.weight.div_(sae.decoder.weight.norm(dim=0, keepdim=True))
        alive |= (z > 0).any(0)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f} dead {int((~alive).sum())}")
