"""A plain 24-layer convolutional net without normalisation, FP32; every weight starts at N(0, 0.02) as in the DCGAN paper."""

import torch
import torch.nn.functional as F
from torch import nn


class Plain(nn.Module):
    def __init__(self, width=12, depth=24):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 2, 1)
        self.body = nn.Sequential()
        for i in range(depth):
            self.body.add_module(f"conv{i}", nn.Conv2d(width, width, 3, padding=1))
            self.body.add_module(f"act{i}", nn.LeakyReLU(0.1))
        self.fc = nn.Linear(width, 4)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).mean((2, 3)))


def initialise(m):
    if isinstance(m, nn.Conv2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
        nn.init.zeros_(m.bias)


def digits(n):
    y = torch.randint(4, (n,))
    x = 0.3 * torch.randn(n, 1, 12, 12)
    for i, k in enumerate(y.tolist()):
        x[i, 0, 3 * k : 3 * k + 3] += 1.0
    return x, y


torch.manual_seed(0)
model = Plain()
model.apply(initialise)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(50):
    x, y = digits(32)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
