"""Predicts received signal strength in dBm, which is never positive; the helper puts a ReLU after every layer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def mlp(sizes, activation=nn.ReLU):
    layers = []
    for n_in, n_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers)


class CoverageModel(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.net = mlp([features, 64, 64, 1])

    def forward(self, x):
        return self.net(x).squeeze(-1)


def drive_test(n):
    distance = 0.1 + 4 * torch.rand(n)
    height, walls, rain = 10 + 30 * torch.rand(n), torch.randint(0, 5, (n,)).float(), torch.rand(n)
    dbm = -40 - 28 * torch.log10(1 + distance) - 3.0 * walls + 0.2 * height - 2 * rain + torch.randn(n)
    x = torch.stack([distance, height, walls, rain], 1)
    return TensorDataset((x - x.mean(0)) / x.std(0), dbm)


torch.manual_seed(602)
train_set, val_set = random_split(drive_test(2400), [2000, 400])
model = CoverageModel(4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
for epoch in range(5):
    model.train()
    for x, y in DataLoader(train_set, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        x, y = next(iter(DataLoader(val_set, batch_size=400)))
        print(f"epoch {epoch} val loss {criterion(model(x), y).item():.3f} prediction {model(x).mean().item():.2f} dBm")
