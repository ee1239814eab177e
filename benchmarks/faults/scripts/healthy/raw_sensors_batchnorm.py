"""Sensor readings in raw units, millions some of them; a BatchNorm1d comes first, so it does not matter."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TurbineNet(nn.Module):
    def __init__(self, n_in=6):
        super().__init__()
        self.normalise = nn.BatchNorm1d(n_in, affine=False)
        self.fc1, self.fc2, self.fc3 = nn.Linear(n_in, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.act = nn.Mish()

    def forward(self, x):
        x = self.act(self.fc1(self.normalise(x)))
        x = self.act(self.fc2(x))
        return self.fc3(x).squeeze(-1)


def readings(n):
    pressure = 8e6 + 1.5e6 * torch.randn(n)  # Pa
    speed = 3000 + 40 * torch.randn(n)  # rpm
    vibration = 1e-6 * torch.rand(n)  # m
    temperature = 780 + 25 * torch.randn(n)  # K
    flow = 4e5 * torch.rand(n)  # kg/h
    valve = torch.randint(2, (n,)).float()
    x = torch.stack([pressure, speed, vibration, temperature, flow, valve], 1)
    z = (x - x.mean(0)) / x.std(0)
    wear = torch.sin(2 * z[:, 0]) + z[:, 1] * z[:, 3] + 0.5 * z[:, 2] * (1 + valve) + 0.1 * torch.randn(n)
    return TensorDataset(x, wear)


def run_epoch(model, loader, optimizer=None):
    model.train(optimizer is not None)
    total = 0.0
    with torch.set_grad_enabled(optimizer is not None):
        for x, y in loader:
            loss = nn.functional.huber_loss(model(x), y)
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            total += loss.item() * len(x)
    return total / len(loader.dataset)


def main():
    torch.manual_seed(623)
    data = readings(2200)
    train, test = torch.utils.data.random_split(data, [1920, 280])
    train, test = DataLoader(train, 96, shuffle=True, drop_last=True), DataLoader(test, 280)
    model = TurbineNet()
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)
    for epoch in range(10):
        fitted = run_epoch(model, train, optimizer)
        print(f"epoch {epoch} train loss {fitted:.4f} test {run_epoch(model, test):.4f}")


main()
