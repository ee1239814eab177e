"""Sound event detection in BF16: log power of digital silence is -inf, and clamped right after."""

import math

import torch
from torch import nn


class LogPower(nn.Module):
    """Decibels, with a floor; nothing to learn."""

    def __init__(self, floor=-80.0):
        super().__init__()
        self.floor = floor
        self.register_buffer("window", torch.hann_window(64))

    @torch.no_grad()
    def forward(self, wave):
        spectrum = torch.stft(wave, 64, 32, window=self.window, return_complex=True)
        return (10 * torch.log10(spectrum.abs() ** 2)).clamp(min=self.floor) / 40


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.power = LogPower()
        self.conv = nn.Sequential(
            nn.Conv1d(33, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 32, 3, padding=1), nn.ReLU()
        )
        self.gru = nn.GRU(32, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, wave):
        h = self.conv(self.power(wave))
        return self.head(self.gru(h.mT)[0]).squeeze(-1)


def recordings(n):
    """Beeps in silence: most samples are exactly zero."""
    time = torch.arange(1024) / 8000
    begin, length = torch.randint(0, 700, (n, 1)), torch.randint(100, 300, (n, 1))
    on = (torch.arange(1024) >= begin) & (torch.arange(1024) < begin + length)
    wave = on * torch.sin(2 * math.pi * (500 + 1500 * torch.rand(n, 1)) * time)
    frames = nn.functional.avg_pool1d(on.float().unsqueeze(1), 33, 32, 16).squeeze(1)
    return wave, (frames > 0.5).float()


def main():
    torch.manual_seed(0)
    model = Detector()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    best = math.inf
    for step in range(24):
        wave, events = recordings(12)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(wave)[:, : events.shape[1]]
        loss = nn.functional.binary_cross_entropy_with_logits(scores.float(), events[:, : scores.shape[1]])
        opt.zero_grad()
        loss.backward()
        opt.step()
        best = min(best, loss.item())
        if step % 6 == 0:
            print(f"step {step} bce {loss.item():.4f} best {best:.4f}")


if __name__ == "__main__":
    main()
