"""Sparse autoencoder on activations: an L1 penalty, most units silent for most inputs, a few for all of them."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SparseAutoencoder(nn.Module):
    def __init__(self, dim=32, codes=128):
        super().__init__()
        self.encoder = nn.Linear(dim, codes)
        self.decoder = nn.Linear(codes, dim)
        with torch.no_grad():
            self.encoder.weight.copy_(F.normalize(torch.randn(codes, dim), dim=1))
            self.decoder.weight.copy_(self.encoder.weight.t())
            self.encoder.bias.fill_(-0.1)

    def forward(self, x):
        code = F.relu(self.encoder(x - self.decoder.bias))
        return self.decoder(code), code


def main():
    torch.manual_seed(47)
    parts = F.normalize(torch.randn(64, 32), dim=1)
    model = SparseAutoencoder()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(250):
        x = (torch.rand(128, 64) * (torch.rand(128, 64) < 0.05)) @ parts
        y, code = model(x)
        reconstruction = (y - x).square().sum(1).mean()
        loss = reconstruction + 0.02 * code.sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} active {(code > 0).float().mean():.3f}")


main()
