"""Credit scores by a fourteen-layer perceptron of sigmoids, FP32, initialised as in the nineties."""

import torch
from torch import nn


class Scorer(nn.Module):
    def __init__(self, features=20, hidden=32, depth=14):
        super().__init__()
        self.inp = nn.Linear(features, hidden)
        self.hidden = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        x = torch.sigmoid(self.inp(x))
        for layer in self.hidden:
            x = torch.sigmoid(layer(x))
        return self.out(x).squeeze(-1)


def customers(n):
    x = torch.randn(n, 20)
    return x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).float()


torch.manual_seed(0)
model = Scorer()
for m in model.modules():
    if isinstance(m, nn.Linear):
        nn.init.uniform_(m.weight, -0.25, 0.25)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.BCEWithLogitsLoss()
for step in range(80):
    x, y = customers(64)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
