import torch
from torch import nn


class WindowNorm(nn.Module):
    """Takes a window's mean and deviation away and gives them back to the forecast. One pass over the window is enough."""

    def __init__(self, eps=1e-2):
        super().__init__()
        self.eps = eps
        self.gain, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def statistics(self, x):
        n = x.shape[1]
        total, squares = x.sum(1, keepdim=True), (x * x).sum(1, keepdim=True)
        mean = total / n
        return mean, ((squares / n - mean * mean).clamp(min=0.0) + self.eps).sqrt()

    def forward(self, x):
        mean, deviation = self.statistics(x)
        return (x - mean) / deviation * self.gain + self.shift, mean, deviation


class Mixing(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
