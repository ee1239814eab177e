"""Learns which chute a parcel takes from its tracking number and measures, read as one table of numbers."""

import torch
import torch.nn as nn
import torch.nn.functional as F

CHUTES, DEPOTS = 12, 96


class ChuteNet(nn.Module):
    def __init__(self, dim=16, hidden=48):
        super().__init__()
        self.depot = nn.Embedding(DEPOTS, dim)
        self.measures = nn.BatchNorm1d(3)
        self.net = nn.Sequential(nn.Linear(dim + 3, hidden), nn.ReLU(), nn.Linear(hidden, CHUTES))

    def forward(self, row):
        number = row[:, 0].long()
        return self.net(torch.cat([self.depot(number % DEPOTS), self.measures(row[:, 1:])], 1))


class ParcelTable(torch.utils.data.Dataset):
    """Columns: tracking number, weight in grams, length and height in centimetres."""

    def __init__(self, n):
        number = torch.randint(300_000_000, 900_000_000, (n,))
        weight, length, height = 5000 * torch.rand(n), 10 + 90 * torch.rand(n), 2 + 40 * torch.rand(n)
        route = torch.randint(CHUTES // 2, (DEPOTS,))
        self.chute = 2 * route[number % DEPOTS] + (weight > 2500).long()
        columns = [number.to(torch.float32), weight, length, height]
        self.rows = torch.stack(columns, 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.chute[index]


torch.manual_seed(199)
table = ParcelTable(8000)
loader = torch.utils.data.DataLoader(table, batch_size=100, shuffle=True)
model = ChuteNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
step = 0
for epoch in range(3):
    for row, chute in loader:
        loss = F.cross_entropy(model(row), chute)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        step += 1
