"""Travel times from noisy legs: distances add up in FP32 and only their differences enter the BF16 network."""

import torch
from torch import nn


class Legs(nn.Module):
    """From gaps to the time since each of the last stops, scaled to about one."""

    def __init__(self, lags=(1, 3, 6)):
        super().__init__()
        self.lags = lags

    def forward(self, gaps):
        with torch.autocast("cpu", enabled=False):
            clock = 3.0e4 + gaps.to(torch.float32).cumsum(1)  # seconds of the day
            features = [clock[:, -1] - clock[:, -1 - lag] for lag in self.lags]
            return torch.stack(features, 1) / 300.0 - 1.0


class Arrival(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.legs = Legs()
        self.net = nn.Sequential(nn.Linear(3, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.out = nn.Linear(hidden, 1)

    def forward(self, gaps):
        return self.out(self.net(self.legs(gaps))).squeeze(1)


def trips(n, stops=60):
    pace = 0.5 + torch.rand(n, 1)
    gaps = 120.0 * pace * (0.7 + 0.6 * torch.rand(n, stops))
    return gaps, gaps[:, -3:].mean(1) / 60.0 + 0.05 * torch.randn(n)


def train_one(model, optimizer, gaps, minutes):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = model(gaps)
    loss = nn.functional.smooth_l1_loss(prediction.to(torch.float32), minutes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(21114)
    model = Arrival()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
    for step in range(80):
        loss = train_one(model, optimizer, *trips(64))
        schedule.step()
        if step % 2 == 0:
            print(f"step {step} loss {loss:.4f}")


if __name__ == "__main__":
    main()
