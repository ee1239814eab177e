"""Tells tremors from quarry blasts. Ported from Keras, with its BatchNorm eps of 1e-3; the traces are in metres."""

import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 1e-3


class TremorNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.bn0 = nn.BatchNorm1d(3, eps=EPS, momentum=0.01)
        self.conv1 = nn.Conv1d(3, 16, 7, stride=2)
        self.bn1 = nn.BatchNorm1d(16, eps=EPS, momentum=0.01)
        self.conv2 = nn.Conv1d(16, 32, 5, stride=2)
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        x = self.bn0(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.conv2(x))
        return self.fc(x.amax(2))


def traces(n):
    y = torch.randint(3, (n,))
    t = torch.linspace(0, 1, 64)
    wave = torch.sin(6.28 * t * (4 + 3 * y[:, None]) + 6.28 * torch.rand(n, 1)) * torch.exp(-2 * t)
    x = wave[:, None] * torch.tensor([1.0, 0.7, 0.4])[:, None] + 0.5 * torch.randn(n, 3, 64)
    return 2e-6 * x, y  # metres


torch.manual_seed(1960)
model = TremorNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(140):
    x, y = traces(64)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
