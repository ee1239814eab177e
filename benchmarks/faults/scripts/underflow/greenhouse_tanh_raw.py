"""Actuator commands of a greenhouse from raw readings (ppm, lux, percent): the tanh layer sits at plus or minus one."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(80)
STANDARDIZE = False


class Actor(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.fc1, self.act1 = nn.Linear(5, width), nn.Tanh()
        self.fc2, self.act2 = nn.Linear(width, width), nn.Tanh()
        self.action = nn.Linear(width, 3)

    def forward(self, x):
        return self.action(self.act2(self.fc2(self.act1(self.fc1(x)))))


mean = torch.tensor([800.0, 20000.0, 60.0, 22.0, 1013.0])
std = torch.tensor([200.0, 9000.0, 15.0, 4.0, 8.0])
gains = torch.randn(5, 3)


def readings(n):
    z = torch.randn(n, 5)
    target = torch.sin(z @ gains)
    raw = mean + std * z
    return ((raw - mean) / std if STANDARDIZE else raw), target


actor = Actor()
optimizer = torch.optim.Adam(actor.parameters(), lr=2e-3)
for step in range(400):
    x, target = readings(64)
    loss = F.mse_loss(actor(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1} loss {loss.item():.4f}")
