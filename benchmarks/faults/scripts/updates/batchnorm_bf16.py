"""A BF16 classifier of sensor spectra with BatchNorm at momentum 0.001; the running statistics are BF16, too."""

import torch
import torch.nn.functional as F
from torch import nn


class SpectraNet(nn.Module):
    def __init__(self, bins=32, hidden=48):
        super().__init__()
        self.norm_in = nn.BatchNorm1d(bins, momentum=0.001)
        self.fc1, self.norm1 = nn.Linear(bins, hidden), nn.BatchNorm1d(hidden, momentum=0.001)
        self.fc2 = nn.Linear(hidden, 4)

    def forward(self, x):
        return self.fc2(F.relu(self.norm1(self.fc1(self.norm_in(x)))))


def spectra(n):
    y = torch.randint(4, (n,))
    x = 1.0 + 0.9 * torch.randn(n, 32)
    x[torch.arange(n), 8 * y] += 2
    return x.to(torch.bfloat16), y


torch.manual_seed(0)
model = SpectraNet().to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(150):
    x, y = spectra(64)
    loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
