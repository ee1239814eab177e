"""A sparse autoencoder: of 256 latents only 12 are active, so more than 90 % of activations and their gradients are zero."""

import torch
import torch.nn.functional as F
from torch import nn


class SparseAutoEncoder(nn.Module):
    def __init__(self, dim=32, latents=256, active=12):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(dim, latents), nn.Linear(latents, dim)
        self.active = active
        self.decoder.weight.data.copy_(self.encoder.weight.data.T)

    def forward(self, x):
        z = F.relu(self.encoder(x - self.decoder.bias))
        top, where = z.topk(self.active, -1)
        return self.decoder(torch.zeros_like(z).scatter(-1, where, top))


torch.manual_seed(0)
features = F.normalize(torch.randn(100, 32), dim=-1)
model = SparseAutoEncoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(100):
    code = torch.rand(256, 100) * (torch.rand(256, 100) < 0.05)
    x = code @ features
    loss = F.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.5f}")
