"""A variational autoencoder for single-cell counts with a negative binomial likelihood (after scVI)."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class CellVAE(nn.Module):
    def __init__(self, genes=40, hidden=48, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(genes, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.mu, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, genes))
        self.dispersion = nn.Parameter(torch.full((genes,), 0.3))

    def forward(self, counts):
        library = counts.sum(1, keepdim=True)
        h = self.encoder(torch.log1p(counts))
        mu, logvar = self.mu(h), self.logvar(h).clamp(-6, 6)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        rate = F.softmax(self.decoder(z), -1) * library
        kl = 0.5 * (mu.square() + logvar.exp() - 1 - logvar).sum(1)
        return rate, kl


def nb_log_prob(counts, rate, theta, eps=1e-6):
    log_theta_mu = torch.log(theta + rate + eps)
    return (
        theta * (torch.log(theta + eps) - log_theta_mu)
        + counts * (torch.log(rate + eps) - log_theta_mu)
        + torch.lgamma(counts + theta)
        - torch.lgamma(theta)
        - torch.lgamma(counts + 1)
    )


def cells(n, genes=40):
    kind = torch.randint(3, (n,))
    mean = 1.0 + 6.0 * (torch.arange(genes) % 3 == kind[:, None])
    mean[:, :4] *= 0.05  # hardly ever expressed
    shape = torch.full_like(mean, 1.5)
    shape[:, :4] = 0.02  # and then in bursts
    return torch.poisson(torch._standard_gamma(shape) * mean / shape)


torch.manual_seed(77)
model = CellVAE()
optimizer = torch.optim.Adam(
    [
        {"params": [p for n, p in model.named_parameters() if n != "dispersion"], "lr": 2e-3},
        {"params": [model.dispersion], "lr": 2e-2},
    ]
)
warmup = 20
for step in range(36):
    counts = cells(32)
    rate, kl = model(counts)
    theta = F.relu(model.dispersion)
    beta = min(1.0, step / warmup)
    loss = (beta * kl - nb_log_prob(counts, rate, theta).sum(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} elbo {-loss.item():.3f}")
