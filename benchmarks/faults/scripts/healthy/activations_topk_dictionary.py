"""A top-k sparse autoencoder on the activations of another network; 8 of 256 latents are on per sample."""

import torch
import torch.nn as nn

torch.manual_seed(207)
D, LATENTS, K = 32, 256, 8
directions = nn.functional.normalize(torch.randn(120, D), dim=1)


def activations(n):
    code = torch.rand(n, 120) * (torch.rand(n, 120) < 0.04)
    return code @ directions + 0.02 * torch.randn(n, D)


class TopK(nn.Module):
    def forward(self, z):
        values, where = z.topk(K, -1)
        return torch.zeros_like(z).scatter_(-1, where, values.relu())


class Dictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(D))
        self.encoder, self.topk = nn.Linear(D, LATENTS), TopK()
        self.decoder = nn.Linear(LATENTS, D, bias=False)
        with torch.no_grad():
            self.decoder.weight.div_(self.decoder.weight.norm(dim=0))
            self.encoder.weight.copy_(self.decoder.weight.t())

    def forward(self, x):
        z = self.topk(self.encoder(x - self.bias))
        return self.decoder(z) + self.bias, z


sae = Dictionary()
optimizer = torch.optim.Adam(sae.parameters(), lr=2e-3, betas=(0.0, 0.999))
fired = torch.zeros(LATENTS)
for step in range(200):
    x = activations(128)
    out, z = sae(x)
    loss = (out - x).square().sum(-1).mean() / x.var(0).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        sae.decoder.weight.div_(sae.decoder.weight.norm(dim=0))
        fired += (z > 0).sum(0)
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f} silent latents {(fired == 0).sum().item()}")
