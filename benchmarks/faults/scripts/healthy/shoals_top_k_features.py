"""A sparse autoencoder: 8 of 256 features live per sample, the others are exact zeros; unused ones are re-drawn now and then."""

import torch
import torch.nn as nn
import torch.nn.functional as F

K, FEATURES, DIM = 8, 256, 32


class TopKSAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.b_dec = nn.Parameter(torch.zeros(DIM))
        self.encoder = nn.Linear(DIM, FEATURES)
        self.decoder = nn.Linear(FEATURES, DIM, bias=False)
        self.encoder.weight.data.copy_(self.decoder.weight.data.t())

    def forward(self, x):
        a = F.relu(self.encoder(x - self.b_dec))
        values, index = a.topk(K, dim=-1)
        codes = torch.zeros_like(a).scatter(-1, index, values)
        return self.decoder(codes) + self.b_dec, codes


def activations(n):
    strength = torch.rand(n, 64) * (torch.rand(n, 64) < 0.08)
    return strength @ directions


torch.manual_seed(2023)
directions = F.normalize(torch.randn(64, DIM), dim=1)
model = TopKSAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
fired = torch.zeros(FEATURES)
for step in range(200):
    x = activations(128)
    recon, codes = model(x)
    loss = F.mse_loss(recon, x) / x.var()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    fired += (codes > 0).sum(0)
    if step % 60 == 59:
        dead = fired == 0
        with torch.no_grad():
            model.encoder.weight[dead] = 0.3 * F.normalize(torch.randn(int(dead.sum()), DIM), dim=1)
        fired.zero_()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
