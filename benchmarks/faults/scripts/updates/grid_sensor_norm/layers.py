import torch
import torch.nn as nn


class RunningScaler(nn.Module):
    """Standardizes a sensor by running statistics, so that a stream can be read sample by sample."""

    def __init__(self, features, momentum=0.001):
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))
        self.momentum = momentum

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0).to(self.mean.dtype), self.momentum)
                self.var.lerp_((x - self.mean).square().mean(0).to(self.var.dtype), self.momentum)
        return ((x - self.mean) / (self.var + 1e-5).sqrt()).clamp(-5, 5)


class GridNet(nn.Module):
    """Frequency deviation from phasors and from line loads."""

    def __init__(self, d=32):
        super().__init__()
        self.phasors = nn.Sequential(nn.Linear(6, d), nn.ReLU(), nn.Linear(d, d))
        self.load_scaler = RunningScaler(6, momentum=0.01)
        self.loads = nn.Sequential(nn.Linear(6, d), nn.ReLU(), nn.Linear(d, d))
        self.out = nn.Linear(2 * d, 1)

    def forward(self, phasors, loads):
        dtype = self.out.weight.dtype
        a = self.phasors(phasors.to(dtype))
        b = self.loads(self.load_scaler(loads).to(dtype))
        return self.out(torch.cat([a, b], 1)).squeeze(1)
