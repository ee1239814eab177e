"""Denoising spectrograms with a complex-valued net. Silence has no phase: every division is guarded by a double where."""

import torch
from torch import nn


class ComplexLinear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in, dtype=torch.cfloat) * (0.5 / n_in) ** 0.5)

    def forward(self, z):
        return z @ self.weight.T


def unit(z):
    """z / |z|, and 0 where z is 0."""
    power = z.real.square() + z.imag.square()
    silent = power == 0
    modulus = torch.where(silent, torch.ones_like(power), power).sqrt()
    return torch.where(silent, torch.zeros_like(z), z / modulus)


class ModReLU(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bias = nn.Parameter(torch.full((n,), -0.02))

    def forward(self, z):
        power = z.real.square() + z.imag.square()
        silent = power == 0
        modulus = torch.where(silent, torch.ones_like(power), power).sqrt().masked_fill(silent, 0.0)
        return torch.relu(modulus + self.bias) * unit(z)


class Denoiser(nn.Module):
    def __init__(self, bins=33, hidden=48):
        super().__init__()
        self.inner, self.act, self.outer = ComplexLinear(bins, hidden), ModReLU(hidden), ComplexLinear(hidden, bins)

    def forward(self, frames):
        return self.outer(self.act(self.inner(torch.fft.rfft(frames, norm="ortho"))))


def tones(batch, frames=6, size=64):
    k = torch.randint(1, 12, (batch, 1, 1))
    t = torch.arange(size) / size * 2 * torch.pi
    clean = torch.sin(k * t + 6 * torch.rand(batch, frames, 1))
    clean[: batch // 4, 3:] = 0.0
    noise = 0.3 * torch.randn_like(clean)
    noise[: batch // 4, 3:] = 0.0
    return clean + noise, clean


torch.manual_seed(72)
model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(40):
    noisy, clean = tones(16)
    error = model(noisy) - torch.fft.rfft(clean, norm="ortho")
    loss = (error.real.square() + error.imag.square()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f}")
