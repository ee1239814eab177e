"""A VAE of bars; the weight of the KL term starts at zero and grows, free bits keep the latents alive."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, pixels=64, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, 96), nn.ReLU(), nn.Linear(96, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 96), nn.ReLU(), nn.Linear(96, pixels))

    def forward(self, x):
        mu, log_var = self.encoder(x).chunk(2, 1)
        z = mu + torch.exp(0.5 * log_var) * torch.randn_like(mu)
        kl = 0.5 * (mu.square() + log_var.exp() - 1 - log_var)
        return self.decoder(z), kl


def bars(n):
    image = torch.zeros(n, 8, 8)
    rows, columns = torch.randint(8, (n,)), torch.randint(8, (n,))
    image[torch.arange(n), rows] = 1
    image[torch.arange(n), :, columns] = 1
    return image.flatten(1)


def main():
    torch.manual_seed(7025)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    steps = 120
    for step in range(steps):
        x = bars(128)
        beta = min(1.0, step / (0.6 * steps))
        logits, kl = model(x)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
        loss = reconstruction + beta * kl.mean(0).clamp(min=0.25).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"step {step:3d} beta {beta:.2f} loss {loss.item():.3f} kl {kl.sum(1).mean().item():.3f}")


main()
