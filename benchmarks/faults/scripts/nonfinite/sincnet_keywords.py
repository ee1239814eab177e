"""SincNet (Ravanelli & Bengio 2018): band-pass filters with learned cutoffs, in front of a small CNN."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def sinc(x):
    return torch.where(x == 0, torch.ones_like(x), torch.sin(x) / x)


class SincConv(nn.Module):
    def __init__(self, filters, width, rate):
        super().__init__()
        assert width % 2, "an even filter has no centre"
        edges = torch.linspace(30, rate / 2 - 400, filters + 1)
        self.low = nn.Parameter(edges[:-1, None] / rate)
        self.band = nn.Parameter(edges.diff()[:, None] / rate)
        self.register_buffer("time", torch.arange(-(width // 2), width // 2 + 1).float()[None, :])
        self.register_buffer("window", torch.hamming_window(width, periodic=False))

    def low_pass(self, cutoff):
        return 2 * cutoff * sinc(2 * math.pi * cutoff * self.time)

    def forward(self, x):
        low = self.low.abs()
        high = (low + self.band.abs()).clamp(max=0.5)
        filters = (self.low_pass(high) - self.low_pass(low)) * self.window
        return F.conv1d(x, filters.unsqueeze(1), stride=2)


class SincNet(nn.Module):
    def __init__(self, classes=4, rate=8000):
        super().__init__()
        self.front = SincConv(16, 51, rate)
        self.body = nn.Sequential(
            nn.BatchNorm1d(16),
            nn.LeakyReLU(0.2),
            nn.MaxPool1d(4),
            nn.Conv1d(16, 24, 5),
            nn.BatchNorm1d(24),
            nn.LeakyReLU(0.2),
            nn.AdaptiveMaxPool1d(1),
        )
        self.classify = nn.Linear(24, classes)

    def forward(self, wave):
        return self.classify(self.body(self.front(wave)).squeeze(-1))


def keyword_batch(n, rate=8000, length=1200):
    label = torch.randint(4, (n,))
    time = torch.arange(length) / rate
    pitch = 300.0 + 500.0 * label[:, None]
    wave = torch.sin(2 * math.pi * pitch * (1 + 0.3 * time * 10) * time) + 0.3 * torch.randn(n, length)
    return wave.unsqueeze(1), label


def main():
    torch.manual_seed(17)
    model = torch.compile(SincNet(), backend="aot_eager")
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.95, eps=1e-8)
    for it in range(16):
        wave, label = keyword_batch(12)
        out = model(wave)
        loss = F.cross_entropy(out, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        error = (out.argmax(1) != label).float().mean()
        if it % 4 == 0:
            print(f"it {it} loss={loss.item():.3f} err={error.item():.2f}")


if __name__ == "__main__":
    main()
