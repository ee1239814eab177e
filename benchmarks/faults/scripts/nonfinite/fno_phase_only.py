"""Fourier neural operator on 1-D advection; the spectral layers keep the phase of each mode and learn its magnitude."""

import torch
from torch import nn


class PhaseConv(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.mix = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.gain = nn.Parameter(torch.ones(width, modes))

    def forward(self, u):
        spectrum = torch.fft.rfft(u, norm="ortho")[..., : self.modes]
        mixed = torch.einsum("bim,iom->bom", spectrum, self.mix)
        phase = mixed / mixed.abs()
        return torch.fft.irfft(phase * self.gain, n=u.shape[-1], norm="ortho")


class FNO(nn.Module):
    def __init__(self, width=16, modes=8):
        super().__init__()
        self.lift = nn.Conv1d(1, width, 1, bias=False)
        self.spectral = nn.ModuleList([PhaseConv(width, modes), PhaseConv(width, modes)])
        self.local = nn.ModuleList([nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)])
        self.project = nn.Conv1d(width, 1, 1)

    def forward(self, u):
        h = self.lift(u)
        for spectral, local in zip(self.spectral, self.local):
            h = nn.functional.gelu(spectral(h) + local(h))
        return self.project(h)


def waves(batch, points=64, shift=5):
    grid = torch.arange(points) / points * 2 * torch.pi
    k = torch.randint(1, 5, (batch, 1))
    u = torch.rand(batch, 1) * torch.sin(k * grid + 6 * torch.rand(batch, 1)) + 0.2 * torch.randn(batch, 1)
    return u.unsqueeze(1), u.roll(shift, -1).unsqueeze(1)


torch.manual_seed(21)
model = FNO()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(20):
    u, later = waves(12)
    if step == 8:
        u[3], later[3] = 0.0, 0.0  # a still basin
    loss = nn.functional.mse_loss(model(u), later)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
