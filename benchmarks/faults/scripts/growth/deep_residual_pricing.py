"""Prices used cars with a deep residual network on tabular features."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    blocks: int = 14
    width: int = 48
    features: int = 10
    epochs: int = 8
    batch_size: int = 64
    lr: float = 1e-3
    seed: int = 29


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        for fc in (self.fc1, self.fc2):
            nn.init.kaiming_normal_(fc.weight)
            nn.init.zeros_(fc.bias)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(x)))


class PriceNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.inp = nn.Linear(cfg.features, cfg.width)
        self.blocks = nn.Sequential(*(ResidualBlock(cfg.width) for _ in range(cfg.blocks)))
        self.out = nn.Linear(cfg.width, 1)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))[:, 0]


def cars(n, cfg):
    x = torch.randn(n, cfg.features)
    price = x[:, 0] - 0.8 * x[:, 1].abs() + 0.5 * x[:, 2] * x[:, 3] + 0.1 * torch.randn(n)
    return x, price


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.train, self.val = cars(2048, cfg), cars(512, cfg)
        self.model = PriceNet(cfg)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)

    def epoch(self):
        x, y = self.train
        for idx in torch.randperm(len(x)).split(self.cfg.batch_size):
            self.optimizer.zero_grad()
            F.smooth_l1_loss(self.model(x[idx]), y[idx]).backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        x, y = self.val
        return F.smooth_l1_loss(self.model(x), y).item()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.epoch()
            print(f"epoch {epoch} val loss {self.validate():.4f}")


if __name__ == "__main__":
    cfg = Config()
    torch.manual_seed(cfg.seed)
    trainer = Trainer(cfg)
    trainer.fit()
