"""Tabular regression on raw columns (age, income, hours, altitude) with a tanh network."""

import torch
import torch.nn as nn
import torch.nn.functional as F

STANDARDIZE = False


class TanhNet(nn.Module):
    def __init__(self, features=4, hidden=48):
        super().__init__()
        self.layer1 = nn.Linear(features, hidden)
        self.layer2 = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, x):
        h = torch.tanh(self.layer1(x))
        h = torch.tanh(self.layer2(h))
        return self.output(h).squeeze(-1)


def table(n):
    z = torch.randn(n, 4)
    columns = torch.tensor([45.0, 38000.0, 36.0, 420.0]) + z * torch.tensor([14.0, 9000.0, 8.0, 150.0])
    target = torch.sin(z[:, 0]) + 0.5 * z[:, 1] * z[:, 2] - 0.3 * z[:, 3]
    return columns, target


torch.manual_seed(2116)
x_train, y_train = table(2048)
if STANDARDIZE:
    x_train = (x_train - x_train.mean(0)) / x_train.std(0)
net = TanhNet()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(12):
    order = torch.randperm(len(x_train))
    running = 0.0
    for chunk in order.split(64):
        loss = F.mse_loss(net(x_train[chunk]), y_train[chunk])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item() / 32
    print(f"epoch {epoch + 1} loss {running:.4f}")
