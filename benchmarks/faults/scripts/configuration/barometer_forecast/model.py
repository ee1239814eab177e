from layers import Mixing, WindowNorm
from torch import nn


class PressureForecaster(nn.Module):
    def __init__(self, window=48, horizon=12, dim=64, depth=3):
        super().__init__()
        self.window_norm = WindowNorm()
        self.embed = nn.Linear(window, dim)
        self.mix = nn.Sequential(*[Mixing(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, horizon)

    def forward(self, pressure):
        x, mean, deviation = self.window_norm(pressure)
        return self.head(self.mix(self.embed(x))) * deviation + mean
