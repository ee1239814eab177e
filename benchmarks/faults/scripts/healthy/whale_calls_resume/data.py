import math

import torch


def calls(n, generator, samples=256):
    """Chirps of four species in noise; the recordings differ in loudness by a factor of a hundred."""
    y = torch.randint(4, (n,), generator=generator)
    t = torch.linspace(0, 1, samples)
    start = torch.tensor([6.0, 12.0, 12.0, 24.0])[y][:, None] * (1 + 0.1 * torch.randn(n, 1, generator=generator))
    sweep = torch.tensor([6.0, -4.0, 8.0, -10.0])[y][:, None]
    phase = 2 * math.pi * torch.rand(n, 1, generator=generator)
    x = torch.sin(2 * math.pi * (start * t + sweep * t**2) + phase)
    x = x + 0.4 * torch.randn(n, samples, generator=generator)
    loudness = 10 ** (2 * torch.rand(n, 1, generator=generator))
    return (loudness * x)[:, None], y
