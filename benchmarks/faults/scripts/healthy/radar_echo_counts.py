"""Rain or insects? Raw radar echoes of up to 1e9 counts go through BatchNorm in FP32; nothing is normalised before."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class EchoNet(nn.Module):
    def __init__(self, gates=16, hidden=64, classes=3):
        super().__init__()
        self.bn_in = nn.BatchNorm1d(gates)
        self.fc1 = nn.Linear(gates, hidden)
        self.bn1 = nn.BatchNorm1d(hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.fc1(self.bn_in(x))))
        return self.fc2(x)


def echoes(n):
    y = torch.randint(3, (n,))
    x = torch.rand(n, 16) * 3e8
    x[torch.arange(n), y * 5] += 6e8
    x[:, 15] = 1e9 + 1e7 * torch.randn(n)
    return x, y


torch.manual_seed(1935)
model = EchoNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(150):
    x, y = echoes(64)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
