"""A sparse autoencoder on recorded activations: of 512 latents the 8 largest are kept."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--latents", type=int, default=512)
parser.add_argument("--k", type=int, default=8)
parser.add_argument("--steps", type=int, default=220)
parser.add_argument("--lr", type=float, default=3e-3)
args = parser.parse_args()

torch.manual_seed(55)
DIM, CONCEPTS = 64, 128
dictionary = F.normalize(torch.randn(CONCEPTS, DIM), dim=1)


def activations(n):
    """A few concepts at a time, and one direction that is always large, as in language models."""
    active = (torch.rand(n, CONCEPTS) < 4 / CONCEPTS).float() * (1 + torch.rand(n, CONCEPTS))
    x = active @ dictionary + 0.02 * torch.randn(n, DIM)
    x[:, 7] += 40
    return x


class TopKAutoencoder(nn.Module):
    def __init__(self, latents, k):
        super().__init__()
        self.k = k
        self.pre_bias = nn.Parameter(activations(512).mean(0))
        self.encoder = nn.Linear(DIM, latents)
        self.decoder = nn.Linear(latents, DIM, bias=False)
        with torch.no_grad():
            self.decoder.weight.copy_(F.normalize(self.decoder.weight, dim=0))
            self.encoder.weight.copy_(self.decoder.weight.T)

    def forward(self, x):
        z = F.relu(self.encoder(x - self.pre_bias))
        top = z.topk(self.k, dim=-1)
        sparse = torch.zeros_like(z).scatter(-1, top.indices, top.values)
        return self.decoder(sparse) + self.pre_bias


sae = TopKAutoencoder(args.latents, args.k)
optimizer = torch.optim.Adam(sae.parameters(), lr=args.lr)
for step in range(1, args.steps + 1):
    x = activations(256)
    loss = (sae(x) - x).square().sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
