"""Voiced speech at 8 kHz: a pitch with a few harmonics and a slow envelope, recorded quietly."""

import math

import torch

RATE = 8000
FRAME = 256


def clips(n, frames, generator):
    t = torch.arange(frames * FRAME) / RATE
    pitch = 90 + 30 * torch.rand(n, 1, generator=generator)
    phase = 2 * math.pi * torch.rand(n, 1, generator=generator)
    tone = sum(torch.sin(2 * math.pi * k * pitch * t + k * phase) / k for k in (1, 2, 3))
    envelope = 0.6 + 0.4 * torch.sin(2 * math.pi * (1 + torch.rand(n, 1, generator=generator)) * t + phase)
    return (0.03 * envelope * tone).reshape(n, frames, FRAME)
