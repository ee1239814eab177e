"""Masked-autoencoder pre-training on log-mel spectrograms of short clips, BF16 autocast."""

import math
import sys

import torch
from torch import nn

RATE, N_FFT, HOP, MELS = 8000, 256, 128, 32
PATCH = 8


def mel_matrix(bins: int, mels: int) -> torch.Tensor:
    """Triangular filters, evenly spaced on the mel axis."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, mels + 2) / 2595) - 1)
    freqs = torch.linspace(0, RATE / 2, bins)
    rising = (freqs - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - freqs) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0) + 1e-4


def make_clip(index: int, generator: torch.Generator) -> torch.Tensor:
    """A few harmonics with noise; now and then the cut falls into the pause between two tracks."""
    t = torch.arange(RATE // 2) / RATE
    pitch = 80 + 400 * torch.rand(1, generator=generator)
    wave = sum(torch.sin(2 * math.pi * pitch * k * t) / k for k in (1, 2, 3))
    wave = wave + 0.05 * torch.randn(t.shape, generator=generator)
    return torch.zeros_like(wave) if index % 461 == 460 else 0.2 * wave


class Frontend:
    def __init__(self):
        self.window = torch.hann_window(N_FFT)
        self.mel = mel_matrix(N_FFT // 2 + 1, MELS)

    def __call__(self, wave: torch.Tensor) -> torch.Tensor:
        spec = torch.stft(wave, N_FFT, HOP, window=self.window, return_complex=True)
        power = spec.real.square() + spec.imag.square()
        return torch.log(self.mel @ power)[..., : MELS - MELS % PATCH]


class Encoder(nn.Module):
    def __init__(self, tokens: int, width: int = 48, depth: int = 2):
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, patches, keep):
        x = self.embed(patches) + self.position
        x = torch.gather(x, 1, keep[..., None].expand(-1, -1, x.shape[-1]))
        return self.blocks(x)


class MaskedAutoencoder(nn.Module):
    def __init__(self, tokens: int, width: int = 48):
        super().__init__()
        self.encoder = Encoder(tokens, width)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.decoder = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, PATCH * PATCH))

    def forward(self, patches, ratio=0.6):
        batch, tokens, _ = patches.shape
        order = torch.rand(batch, tokens).argsort(1)
        keep = order[:, : int(tokens * (1 - ratio))]
        seen = self.encoder(patches, keep)
        full = self.mask_token.expand(batch, tokens, -1).to(seen.dtype)
        full = full.scatter(1, keep[..., None].expand(-1, -1, seen.shape[-1]), seen)
        hidden = torch.ones(batch, tokens).scatter(1, keep, 0.0)
        return self.decoder(full + self.position), hidden


def patchify(x):
    batch, height, width = x.shape
    x = x.reshape(batch, height // PATCH, PATCH, width // PATCH, PATCH).transpose(2, 3)
    return x.reshape(batch, -1, PATCH * PATCH)


def train():
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(6)
    frontend = Frontend()
    model = MaskedAutoencoder(tokens=(MELS // PATCH) ** 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05)
    batch = 8
    for step in range(80):
        waves = torch.stack([make_clip(step * batch + i, generator) for i in range(batch)])
        features = frontend(waves)
        features = (features - features.mean()) / features.std()
        patches = patchify(features)
        with torch.autocast("cpu", torch.bfloat16):
            predicted, hidden = model(patches)
        error = (predicted.float() - patches).square().mean(-1)
        loss = (error * hidden).sum() / hidden.sum()
        loss.backward()
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss_value:.4f}")


if __name__ == "__main__":
    train()
