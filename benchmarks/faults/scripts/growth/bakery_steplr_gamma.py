"""Predicts how many loaves a bakery sells. StepLR is meant to lower the rate every 25 epochs."""

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR


class SalesNet(nn.Module):
    def __init__(self, n_features=12, hidden=64):
        super().__init__()
        self.fc1 = nn.Linear(n_features, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        x = torch.tanh(self.fc1(x))
        x = torch.tanh(self.fc2(x))
        return self.out(x).squeeze(1)


def make_days(n):
    x = torch.randn(n, 12)
    weekend, holiday, rain = x[:, 0] > 0.6, x[:, 1] > 1.2, x[:, 2]
    y = 2 + weekend.float() * 1.5 - holiday.float() + 0.4 * torch.sin(2 * rain) + 0.3 * x[:, 3] * x[:, 4]
    return x, y + 0.05 * torch.randn(n)


torch.manual_seed(77)
x_train, y_train = make_days(512)
model = SalesNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = StepLR(optimizer, step_size=25, gamma=10)
criterion = nn.SmoothL1Loss()

for epoch in range(75):
    order = torch.randperm(len(x_train))
    total = 0.0
    for idx in order.split(128):
        optimizer.zero_grad()
        loss = criterion(model(x_train[idx]), y_train[idx])
        loss.backward()
        optimizer.step()
        total += loss.item() * len(idx)
    scheduler.step()
    if epoch % 3 == 0:
        print(f"Epoch {epoch:3d}  lr {optimizer.param_groups[0]['lr']:.1e}  loss {total / len(x_train):.4f}")
