"""Motion forecasting, FP16 autocast: the forecast's loss is scaled, that of the map reconstruction was forgotten."""

import torch
import torch.nn.functional as F
from torch import nn


class Forecaster(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.track = nn.GRU(2, d, batch_first=True)
        self.future = nn.Linear(d, 16)

    def forward(self, past):
        _, h = self.track(past)
        return self.future(h[-1]).view(-1, 8, 2)


class MapAutoencoder(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.down = nn.Conv2d(1, d, 4, stride=2, padding=1)
        self.mid = nn.Conv2d(d, d, 3, padding=1)
        self.up = nn.ConvTranspose2d(d, 1, 4, stride=2, padding=1)

    def forward(self, raster):
        h = F.relu(self.down(raster))
        return self.up(F.relu(self.mid(h)))


class Scene(nn.Module):
    def __init__(self):
        super().__init__()
        self.forecaster, self.maps = Forecaster(), MapAutoencoder()

    def forward(self, past, raster):
        return self.forecaster(past), self.maps(raster)


def batch(n=16):
    speed = torch.randn(n, 1, 2)
    t = torch.arange(18).view(1, -1, 1) / 8
    path = speed * t + 0.3 * torch.randn(n, 1, 2) * t**2
    raster = (torch.rand(n, 1, 12, 12) > 0.7).float().repeat_interleave(4, 2).repeat_interleave(4, 3)
    return path[:, :10], path[:, 10:], raster


torch.manual_seed(81)
model = Scene()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(60):
    past, future, raster = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        forecast, seen = model(past, raster)
    error = F.smooth_l1_loss(forecast.float(), future)
    recon = F.mse_loss(seen.float(), raster)
    optimizer.zero_grad()
    scaler.scale(error).backward()
    (0.001 * recon).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step} loss {(error + recon).item():.4f}")
