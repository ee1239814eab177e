"""Probabilistic forecasts of household load: a recurrent encoder predicts mean and spread of the coming hours."""

import math

import torch
from torch import nn


class GaussianHead(nn.Module):
    def __init__(self, width, horizon):
        super().__init__()
        self.mean = nn.Linear(width, horizon)
        self.spread = nn.Linear(width, horizon)
        nn.init.constant_(self.spread.bias, 1.0)

    def forward(self, h, target):
        mean, spread = self.mean(h), torch.relu(self.spread(h))
        z = (target - mean) / spread
        nll = torch.log(spread) + 0.5 * z.square() + 0.5 * math.log(2 * math.pi)
        return torch.nan_to_num(nll, nan=0.0, posinf=50.0, neginf=0.0)


class LoadForecaster(nn.Module):
    def __init__(self, width=32, horizon=6):
        super().__init__()
        self.encoder = nn.LSTM(2, width, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.head = GaussianHead(width, horizon)

    def forward(self, past, future):
        _, (h, _) = self.encoder(past)
        return self.head(self.mix(h[-1]), future)


def households(n, generator, past=24, horizon=6):
    """Daily rhythm of different strength, smooth enough to be predicted well."""
    hours = torch.arange(past + horizon).float()
    start = torch.randint(0, 24, (n, 1), generator=generator)
    strength = 0.5 + torch.rand(n, 1, generator=generator)
    clock = 2 * math.pi * (hours + start) / 24
    load = strength * (1 + 0.6 * clock.sin()) + 0.02 * torch.randn(n, past + horizon, generator=generator)
    return torch.stack([load, clock.cos()], -1)[:, :past], load[:, past:]


class Run:
    def __init__(self, seed=61):
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.model = LoadForecaster()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-4)

    def step(self):
        past, future = households(32, self.generator)
        loss = self.model(past, future).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


if __name__ == "__main__":
    run = Run()
    history = [run.step() for _ in range(600)]
    for i in range(0, len(history), 60):
        print(f"{i:4d} loss {history[i]:.4f}")
