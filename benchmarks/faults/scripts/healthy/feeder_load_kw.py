"""Load of distribution feeders in kilowatts, for which the utility wants an error in kilowatts squared."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(72)
FEATURES, MEAN_KW, STD_KW = 12, 5200.0, 1400.0


def feeders(n):
    x = torch.randn(n, FEATURES)
    x[:, 3] *= 60  # customers, relative to the median
    load = torch.tanh(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.01 * x[:, 3] + 0.1 * torch.randn(n)
    return x, MEAN_KW + STD_KW * load


class LoadNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.inp = nn.Linear(FEATURES, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = F.relu(self.norm(self.inp(x)))
        h = h + F.relu(self.hidden(h))
        return MEAN_KW + STD_KW * self.out(h)[:, 0]


model = LoadNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
train, val = feeders(3072), feeders(512)
for epoch in range(8):
    for idx in torch.randperm(len(train[0])).split(96):
        loss = F.mse_loss(model(train[0][idx]), train[1][idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        print(f"epoch {epoch} val loss {F.mse_loss(model(val[0]), val[1]).item():.1f}")
