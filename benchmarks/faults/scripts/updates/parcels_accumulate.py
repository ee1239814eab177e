"""Parcel weight classes from scanner profiles. Batches of 4 fit, 8 are accumulated."""

import torch
from torch import nn

torch.manual_seed(88)
ACCUMULATE, MICRO, CLASSES = 8, 4, 8
profiles = torch.randn(CLASSES, 40)


def scans(n):
    y = torch.randint(CLASSES, (n,))
    return profiles[y] + 2.0 * torch.randn(n, 40), y


class Scanner(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
        self.classes = nn.Linear(96, CLASSES)

    def forward(self, x):
        return self.classes(self.features(x))


def training_step(model, optimizer, criterion, index):
    x, y = scans(MICRO)
    loss = criterion(model(x), y) / ACCUMULATE
    optimizer.zero_grad()
    loss.backward()
    if (index + 1) % ACCUMULATE == 0:
        optimizer.step()


model = Scanner()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
criterion = nn.CrossEntropyLoss()
val_x, val_y = scans(1000)
for index in range(100 * ACCUMULATE):
    training_step(model, optimizer, criterion, index)
    if (index + 1) % (5 * ACCUMULATE) == 0:
        with torch.no_grad():
            print(f"{(index + 1) // ACCUMULATE} val loss {criterion(model(val_x), val_y).item():.4f}")
