"""Predicts efficiency, NOx and a maintenance flag of a boiler from its sensor readings."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    seed: int = 8
    batch_size: int = 64
    steps: int = 240
    lr: float = 0.02
    width: int = 64


class SensorData:
    """Readings in the units of the plant: kPa, degrees, kg/h, ppm, rpm."""

    MEANS = torch.tensor([1013.0, 540.0, 3200.0, 85.0, 1480.0, 410.0])
    STDS = torch.tensor([12.0, 25.0, 310.0, 14.0, 60.0, 35.0])

    def __init__(self, n, generator):
        z = torch.randn(n, 6, generator=generator)
        self.x = self.MEANS + self.STDS * z
        self.efficiency = torch.tanh(z[:, 0] - z[:, 1] * z[:, 2])
        self.nox = 0.7 * z[:, 3] + torch.relu(z[:, 4])
        self.service = (z[:, 5] + z[:, 0] > 0.4).float()

    def __len__(self):
        return len(self.x)

    def batch(self, idx):
        return self.x[idx], self.efficiency[idx], self.nox[idx], self.service[idx]


class BoilerNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.efficiency = nn.Linear(width, 1)
        self.nox = nn.Linear(width, 1)
        self.service = nn.Linear(width, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.efficiency(h)[:, 0], self.nox(h)[:, 0], self.service(h)[:, 0]


def main(cfg):
    torch.manual_seed(cfg.seed)
    generator = torch.Generator().manual_seed(cfg.seed)
    data = SensorData(4096, generator)
    model = BoilerNet(cfg.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        idx = torch.randint(len(data), (cfg.batch_size,), generator=generator)
        x, efficiency, nox, service = data.batch(idx)
        e, n, s = model(x)
        loss = F.mse_loss(e, efficiency) + F.mse_loss(n, nox) + F.binary_cross_entropy_with_logits(s, service)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    model = main(Config())
