"""Remaining life of pumps with a GRU on raw counts of a data logger (0..4095)."""

import torch
from torch import nn

COUNTS = 1.0  # divide by this


class Life(nn.Module):
    def __init__(self, sensors=5, hidden=32):
        super().__init__()
        self.gru = nn.GRU(sensors, hidden, batch_first=True)
        self.fc1 = nn.Linear(hidden, 32)
        self.fc2 = nn.Linear(32, 1)

    def forward(self, x):
        h, _ = self.gru(x)
        return self.fc2(torch.relu(self.fc1(h[:, -1])))[:, 0]


def history(n, length=30):
    wear = torch.rand(n, 1, 1)
    t = torch.linspace(0, 1, length).view(1, length, 1)
    gain = torch.tensor([900.0, -600.0, 400.0, 1200.0, -300.0])
    x = 2048 + gain * (wear * (0.5 + t) - 0.5) + 60 * torch.randn(n, length, 5)
    return x.clamp(0, 4095).round(), 1 - wear.view(n)


def train():
    torch.manual_seed(39)
    model = Life()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(150):
        x, y = history(32)
        pred = model((x - 2048 * (COUNTS > 1)) / COUNTS)
        loss = nn.functional.mse_loss(pred, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.5f}")


train()
