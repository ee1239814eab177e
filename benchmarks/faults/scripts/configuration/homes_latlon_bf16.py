"""Rents by location, floor area and year of construction; everything on the device is bfloat16."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    seed: int = 40
    dtype: torch.dtype = torch.bfloat16
    batch_size: int = 128
    epochs: int = 12
    lr: float = 4e-3


def listings(n):
    """Longitude, latitude, square feet, year; the rent peaks in two districts."""
    lon, lat = -122.6 + 0.5 * torch.rand(n), 37.4 + 0.5 * torch.rand(n)
    area, year = 400 + 1600 * torch.rand(n), (1950 + 70 * torch.rand(n)).floor()
    centre = torch.exp(-(((lon + 122.42) / 0.06) ** 2) - ((lat - 37.78) / 0.06) ** 2)
    campus = torch.exp(-(((lon + 122.17) / 0.07) ** 2) - ((lat - 37.45) / 0.07) ** 2)
    rent = 2.5 * centre + 2.0 * campus + (area - 1200) / 900 + (year - 1985) / 60 + 0.1 * torch.randn(n)
    return torch.stack([lon, lat, area, year], 1), rent - rent.mean()


class RentNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.mlp = nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.mlp(self.norm(x))[:, 0]


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.train, self.val = listings(3072), listings(768)
        self.model = RentNet().to(cfg.dtype)
        self.model.norm.float()
        self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.optimizer = torch.optim.Adam(self.masters, lr=cfg.lr)

    def to_device(self, x):
        return x.to(self.cfg.dtype)

    def step(self, x, y):
        self.model.zero_grad()
        F.mse_loss(self.model(self.to_device(x)).float(), y).backward()
        for master, p in zip(self.masters, self.model.parameters()):
            master.grad = p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.model.parameters()):
                p.copy_(master)

    def fit(self):
        x, y = self.train
        for epoch in range(self.cfg.epochs):
            self.model.train()
            for idx in torch.randperm(len(x)).split(self.cfg.batch_size):
                self.step(x[idx], y[idx])
            self.model.eval()
            with torch.no_grad():
                pred = self.model(self.to_device(self.val[0])).float()
            print(f"epoch {epoch} val loss {F.mse_loss(pred, self.val[1]).item():.4f}")


if __name__ == "__main__":
    cfg = Config()
    torch.manual_seed(cfg.seed)
    trainer = Trainer(cfg)
    trainer.fit()
