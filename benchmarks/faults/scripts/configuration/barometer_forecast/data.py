import torch


class Barograms:
    """Pressure in pascal, every ten minutes: the atmosphere's tide, a passing wave, some drift."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def batch(self, n=64, window=48, horizon=12):
        t = torch.arange(window + horizon)
        period = 18 + 20 * torch.rand(n, 1, generator=self.g)
        phase = 6.28 * torch.rand(n, 1, generator=self.g)
        size = 4 + 6 * torch.rand(n, 1, generator=self.g)
        drift = 0.1 * torch.randn(n, 1, generator=self.g)
        level = 101325 + 600 * torch.randn(n, 1, generator=self.g)
        x = level + size * torch.sin(6.28 * t / period + phase) + drift * t
        x = x + 0.4 * torch.randn(x.shape, generator=self.g)
        return x[:, :window], x[:, window:]
