"""Convolutional VAE; the KL term is switched on by a warm-up."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--logvar-lr", type=float, default=8.0)
parser.add_argument("--latent", type=int, default=8)
args = parser.parse_args()


class VAE(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ELU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ELU(),
            nn.Flatten(),
        )
        self.to_mu = nn.Linear(16 * 16, latent)
        self.to_logvar = nn.Linear(16 * 16, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 256),
            nn.Unflatten(1, (16, 4, 4)),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
            nn.ELU(),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
        )

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * (0.5 * logvar.clamp(max=4.0)).exp()

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.to_mu(h), self.to_logvar(h)
        return self.decoder(self.reparameterize(mu, logvar)), mu, logvar


def elbo(reconstruction, x, mu, logvar, beta):
    mse = F.mse_loss(reconstruction, x, reduction="sum") / len(x)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / len(x)
    return mse + beta * kld


def train():
    torch.manual_seed(0)
    model = VAE(args.latent)
    rest = [p for name, p in model.named_parameters() if "logvar" not in name]
    optimizer = torch.optim.Adam(
        [{"params": rest}, {"params": model.to_logvar.parameters(), "lr": args.logvar_lr}], lr=args.lr
    )
    faces = torch.rand(6, 1, 16, 16)
    for step in range(args.steps):
        x = faces[torch.randint(6, (16,))] + 0.05 * torch.randn(16, 1, 16, 16)
        beta = 0.02 if step < 20 else 40.0
        loss = elbo(*((r := model(x))[0], x, r[1], r[2]), beta)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"{step:4d}  {loss.item():.3f}")


train()
