"""A discrete VAE on binary glyphs. The Gumbel noise is cast to the type of the logits, which is BF16 under autocast."""

import torch
from torch import nn
from torch.nn import functional as F


def gumbel_like(logits):
    u = torch.rand(logits.shape).to(logits.dtype)
    return -torch.log(-torch.log(u))


class Codebook(nn.Module):
    def __init__(self, codes, dim):
        super().__init__()
        self.table = nn.Parameter(torch.randn(codes, dim) * 0.3)

    def forward(self, logits, tau):
        soft = F.softmax((logits + gumbel_like(logits)) / tau, dim=-1)
        return soft @ self.table, soft


class DVAE(nn.Module):
    def __init__(self, codes=6, dim=12, slots=2):
        super().__init__()
        self.slots, self.codes = slots, codes
        self.enc = nn.Sequential(nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, slots * codes))
        self.book = Codebook(codes, dim)
        self.dec = nn.Sequential(nn.Linear(slots * dim, 48), nn.SiLU(), nn.Linear(48, 64))

    def forward(self, x, tau):
        logits = self.enc(x).view(-1, self.slots, self.codes)
        z, soft = self.book(logits, tau)
        return self.dec(z.flatten(1)), logits


def glyphs(n, g):
    rows = torch.randint(0, 8, (n,), generator=g)
    cols = torch.randint(0, 8, (n,), generator=g)
    img = torch.zeros(n, 8, 8)
    img[torch.arange(n), rows] = 1.0
    img[torch.arange(n), :, cols] = 1.0
    return img.flatten(1)


def main():
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(1)
    model = DVAE()
    optim = torch.optim.Adam(model.parameters(), lr=3e-3)
    for it in range(60):
        tau = max(0.5, 1.0 - it / 100)
        x = glyphs(2, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            recon, logits = model(x, tau)
            nll = F.binary_cross_entropy_with_logits(recon.float(), x)
        prior = (F.softmax(logits.float(), -1) * F.log_softmax(logits.float(), -1)).sum(-1).mean()
        loss = nll + 0.01 * prior
        optim.zero_grad()
        loss.backward()
        optim.step()
        if it % 10 == 0:
            print(f"[{it}] loss {loss.item():.4f} tau {tau:.2f}")


SEED = 4

if __name__ == "__main__":
    main()
