"""Variational autoencoder of short melodies with a cyclical KL weight (four ramps from zero to 0.02)."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(66)
NOTES, LENGTH, STEPS, CYCLES = 12, 8, 480, 4
MOTIFS = torch.randint(NOTES, (10, LENGTH))


class MelodyVAE(nn.Module):
    def __init__(self, d=48, z=8):
        super().__init__()
        self.embed = nn.Embedding(NOTES, 12)
        self.encode = nn.Sequential(nn.Linear(12 * LENGTH, d), nn.ELU(), nn.Linear(d, 2 * z))
        self.decode = nn.Sequential(nn.Linear(z, d), nn.ELU(), nn.Linear(d, LENGTH * NOTES))

    def forward(self, notes):
        mean, log_var = self.encode(self.embed(notes).flatten(1)).chunk(2, 1)
        z = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        return self.decode(z).view(-1, LENGTH, NOTES), kl


def melodies(n):
    base = MOTIFS[torch.randint(10, (n,))]
    transposed = (base + torch.randint(3, (n, 1))) % NOTES
    return torch.where(torch.rand(n, LENGTH) < 0.05, torch.randint(NOTES, (n, LENGTH)), transposed)


model = MelodyVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(STEPS):
    phase = (step * CYCLES / STEPS) % 1.0
    beta = 0.02 * min(1.0, 2 * phase)
    notes = melodies(48)
    logits, kl = model(notes)
    reconstruction = F.cross_entropy(logits.flatten(0, 1), notes.flatten())
    optimizer.zero_grad()
    (reconstruction + beta * kl).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 8 == 0:
        print(f"{step} beta {beta:.4f} kl {kl.item():.2f} reconstruction loss {reconstruction.item():.4f}")
