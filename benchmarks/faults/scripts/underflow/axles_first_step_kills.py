"""Weighs lorries on a bridge, in kilograms. SGD, whose first steps on raw targets push every hidden unit below zero."""

import torch
import torch.nn as nn

MEAN, UNIT = 0.0, 1.0


class AxleNet(nn.Module):
    def __init__(self, sensors=16, hidden=64):
        super().__init__()
        self.fc1 = nn.Linear(sensors, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, 1)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return self.fc3(x).squeeze(1)


def lorries(n):
    strain = torch.rand(n, 16)
    weight = 18_000 + 9_000 * (strain[:, :4].sum(1) - 2) + 4_000 * (strain[:, 4] > strain[:, 5]).float()
    return strain, weight


torch.manual_seed(7)
net = AxleNet()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
criterion = nn.HuberLoss(delta=1000.0)
for step in range(300):
    strain, weight = lorries(64)
    pred = net(strain)
    loss = criterion(pred, (weight - MEAN) / UNIT)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        error = (pred * UNIT + MEAN - weight).abs().mean()
        print(f"step {step} huber {loss.item():.2f} mae_loss {error.item():.0f} kg")
