"""A masked autoencoder of spectra that sees an eighth of the patches; warm-up from zero and a cosine to zero."""

import math

import torch
from torch import nn

torch.manual_seed(75)
PATCHES, P, D, SEEN, TOTAL = 16, 8, 32, 4, 160


def spectra(n):
    t = torch.linspace(0, 1, PATCHES * P)
    c, w = torch.rand(n, 2, 1), 0.1 + 0.2 * torch.rand(n, 2, 1)
    return torch.exp(-(((t - c) / w) ** 2)).sum(1).unflatten(1, (PATCHES, P))


def block():
    return nn.TransformerEncoderLayer(D, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Linear(P, D), nn.Parameter(0.02 * torch.randn(PATCHES, D))
        self.mask_token = nn.Parameter(torch.zeros(D))
        self.encoder, self.decoder, self.out = block(), block(), nn.Linear(D, P)

    def forward(self, x):
        order = torch.rand(len(x), PATCHES).argsort(1)
        seen = order[:, :SEEN, None]
        h = self.embed(x) + self.pos
        h = self.encoder(h.gather(1, seen.expand(-1, -1, D)))
        full = (self.mask_token + self.pos).expand(len(x), -1, -1)
        full = full.scatter(1, seen.expand(-1, -1, D), h)
        hidden = torch.ones(len(x), PATCHES).scatter(1, seen.squeeze(-1), 0.0)
        error = (self.out(self.decoder(full)) - x).square().mean(-1)
        return (error * hidden).sum() / hidden.sum()


model = MAE()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05)
warm = 20
sched = torch.optim.lr_scheduler.LambdaLR(
    opt, lambda i: i / warm if i < warm else 0.5 * (1 + math.cos(math.pi * (i - warm) / (TOTAL - warm)))
)
for step in range(TOTAL):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(spectra(32))
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
