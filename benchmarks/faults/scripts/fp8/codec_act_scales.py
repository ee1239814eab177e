"""Quantisation-aware training of a waveform codec whose activations are rounded to e4m3."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(5)
FRAME, LATENT = 64, 12


def frames(n):
    t = torch.arange(FRAME) / FRAME
    f, p, a = 1 + 5 * torch.rand(n, 2, 1), 6.28 * torch.rand(n, 2, 1), 0.3 + torch.rand(n, 2, 1)
    return (a * torch.sin(6.28 * f * t + p)).sum(1)


class Float8Fake(nn.Module):
    """Rounds activations to FP8 with one scale for the tensor, recomputed at every call."""

    def __init__(self, dtype=torch.float8_e4m3fn):
        super().__init__()
        self.dtype, self.peak = dtype, torch.finfo(dtype).max

    def forward(self, x):
        with torch.no_grad():
            scale = self.peak / x.abs().max().clamp(min=1e-10)
            q = (x / scale).to(self.dtype).to(x.dtype) * scale
        return x + (q - x).detach()


class Codec(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.analysis = nn.Sequential(Float8Fake(), nn.Linear(FRAME, hidden), nn.Tanh(), nn.Linear(hidden, LATENT))
        self.synthesis = nn.Sequential(
            *(Float8Fake(), nn.Linear(LATENT, hidden), nn.Tanh()), *(Float8Fake(), nn.Linear(hidden, FRAME))
        )

    def forward(self, x):
        return self.synthesis(self.analysis(x))


codec = Codec()
optimizer = torch.optim.Adam(codec.parameters(), lr=4e-3)
for step in range(150):
    x = frames(64)
    loss = F.mse_loss(codec(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 2:
        print(f"{step} loss {loss.item():.5f}")
