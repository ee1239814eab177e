"""Interpolates rain between gauges by a learnt kernel over their positions (metres from the centre of the earth)."""

import torch
import torch.nn as nn
import torch.nn.functional as F

RADIUS = 6_371_000.0


class KernelInterpolator(nn.Module):
    def __init__(self, lengthscale=1000.0):
        super().__init__()
        self.log_length = nn.Parameter(torch.tensor(lengthscale).log())

    def squared_distance(self, a, b):
        return (a * a).sum(1)[:, None] - 2 * a @ b.t() + (b * b).sum(1)

    def forward(self, where, gauges, rain):
        d2 = self.squared_distance(where, gauges).clamp(min=0.0)
        return torch.softmax(-d2 / (2 * self.log_length.exp() ** 2), -1) @ rain


class RainModel(nn.Module):
    def __init__(self, fields=4, hidden=32):
        super().__init__()
        self.interpolate = KernelInterpolator()
        self.refine = nn.Sequential(nn.Linear(fields, hidden), nn.SiLU(), nn.Linear(hidden, fields))

    def forward(self, where, gauges, rain):
        x = self.interpolate(where, gauges, rain)
        return x + self.refine(x)


def cartesian(latitude, longitude):
    return RADIUS * torch.stack(
        [latitude.cos() * longitude.cos(), latitude.cos() * longitude.sin(), latitude.sin()], -1
    )


class Region:
    """A square of twelve kilometres in the Alps."""

    def __init__(self, gauges=160, fields=4):
        self.latitude = torch.deg2rad(46.5 + 0.11 * torch.rand(gauges))
        self.longitude = torch.deg2rad(11.0 + 0.16 * torch.rand(gauges))
        self.wave = torch.randn(fields, 2) * 2500

    def rain(self, latitude, longitude):
        place = torch.stack([latitude - latitude.new_tensor(0.815), longitude - longitude.new_tensor(0.198)], -1)
        return torch.sin(place @ self.wave.t()) + torch.cos(1.7 * place @ self.wave.flip(1).t())

    def batch(self, n):
        latitude = torch.deg2rad(46.5 + 0.11 * torch.rand(n))
        longitude = torch.deg2rad(11.0 + 0.16 * torch.rand(n))
        return cartesian(latitude, longitude), self.rain(latitude, longitude)


torch.manual_seed(193)
region, model = Region(), RainModel()
gauges = cartesian(region.latitude, region.longitude)
observed = region.rain(region.latitude, region.longitude)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(200):
    where, truth = region.batch(128)
    loss = F.mse_loss(model(where, gauges, observed), truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
