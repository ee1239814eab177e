"""Autoencoder of pump vibration spectra; model in half precision, loss scale by hand, FP32 copies in the optimizer."""

import torch
from torch import nn

torch.manual_seed(2024)
BANDS = 96
SCALE = 4096.0


def spectra(n):
    f = torch.arange(BANDS) / BANDS
    speed = 0.08 + 0.1 * torch.rand(n, 1)
    s = sum(torch.exp(-((f - k * speed) ** 2) / 2e-4) / k for k in (1, 2, 3, 4))
    return s + 0.02 * torch.randn(n, BANDS)


class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(BANDS, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 4))
        self.dec = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, BANDS))

    def forward(self, x):
        return self.dec(self.enc(x))


model = AE().half()
master = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
optim = torch.optim.Adam(master, lr=3e-3)

for it in range(150):
    x = spectra(128)
    rec = model(x.half())
    loss = (rec.float() - x).square().mean()
    (1e-3 * loss * SCALE).backward()
    for m, p in zip(master, model.parameters()):
        p.grad /= SCALE
        m.grad = p.grad.float()
        p.grad = None
    optim.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters()):
            p.copy_(m)
    if it % 3 == 0:
        print(f"it {it} loss {loss.item():.6f}")
