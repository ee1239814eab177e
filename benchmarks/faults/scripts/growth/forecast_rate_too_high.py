"""Demand forecasting from raw counts with plain SGD; the learning rate is a little too high, and the loss only grows."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LEARNING_RATE = 2.6e-5


class Forecaster(nn.Module):
    def __init__(self, window=28, horizon=7):
        super().__init__()
        self.trend = nn.Linear(window, horizon)
        self.hidden = nn.Linear(window, 16)
        self.season = nn.Linear(16, horizon)

    def forward(self, x):
        return self.trend(x) + self.season(torch.tanh(self.hidden(x / 10)))


def series(n, length=35):
    days = torch.arange(length)
    level = 10 + 10 * torch.rand(n, 1)
    week = 4 * torch.sin(6.2832 * (days + torch.randint(7, (n, 1))) / 7)
    return level + 0.1 * torch.rand(n, 1) * days + week + torch.randn(n, length)


torch.manual_seed(511)
data = series(800)
loader = DataLoader(TensorDataset(data[:, :28], data[:, 28:]), batch_size=40, shuffle=True)
model = Forecaster()
criterion = nn.MSELoss(reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
for epoch in range(3):
    for i, (past, future) in enumerate(loader):
        loss = criterion(model(past), future) / future.shape[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2 == 0:
            print(f"epoch {epoch} batch {i} loss {loss.item() / len(past):.6e}")
