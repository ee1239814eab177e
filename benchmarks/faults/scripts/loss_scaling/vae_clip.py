"""A convolutional VAE in FP16 with gradient clipping added "like in every other project"."""

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.SiLU(), nn.Conv2d(16, 16, 4, 2, 1), nn.SiLU(), nn.Flatten()
        )
        self.moments = nn.Linear(16 * 16, 2 * latent)
        self.expand = nn.Linear(latent, 16 * 16)
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (16, 4, 4)),
            nn.ConvTranspose2d(16, 16, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1),
        )

    def forward(self, x):
        mean, log_var = self.moments(self.encoder(x)).float().chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(self.expand(z)), mean, log_var


def crosses(n):
    image = torch.zeros(n, 1, 16, 16)
    for i in range(n):
        r, c = torch.randint(2, 14, (2,)).tolist()
        image[i, 0, r, :], image[i, 0, :, c] = 1.0, 1.0
    return image


torch.manual_seed(0)
model = VAE()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(80):
    x = crosses(32)
    with torch.autocast("cpu", dtype=torch.float16):
        recon, mean, log_var = model(x)
    rec = F.binary_cross_entropy_with_logits(recon.float(), x) * 16
    loss = rec - 0.01 * (1 + log_var - mean.square() - log_var.exp()).sum(-1).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
