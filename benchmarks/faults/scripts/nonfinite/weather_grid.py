"""Next-hour forecast of temperature on a small grid with a ConvLSTM-like cell; data as read from NetCDF files."""

import torch
from torch import nn


class ConvGRUCell(nn.Module):
    def __init__(self, cin, hidden):
        super().__init__()
        self.gates = nn.Conv2d(cin + hidden, 2 * hidden, 3, padding=1)
        self.candidate = nn.Conv2d(cin + hidden, hidden, 3, padding=1)

    def forward(self, x, h):
        r, z = torch.sigmoid(self.gates(torch.cat([x, h], 1))).chunk(2, 1)
        n = torch.tanh(self.candidate(torch.cat([x, r * h], 1)))
        return (1 - z) * h + z * n


class Forecaster(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.cell = ConvGRUCell(1, hidden)
        self.read = nn.Conv2d(hidden, 1, 1)
        self.hidden = hidden

    def forward(self, sequence):
        h = sequence.new_zeros(sequence.size(0), self.hidden, *sequence.shape[-2:])
        for frame in sequence.unbind(1):
            h = self.cell(frame.unsqueeze(1), h)
        return self.read(h).squeeze(1)


def netcdf_like(hours=120):
    g = torch.Generator().manual_seed(1)
    base = torch.sin(torch.arange(hours) / 24 * 6.283)[:, None, None]
    field = base + 0.2 * torch.randn(hours, 8, 8, generator=g)
    field[85, 2, 5] = 9.96921e36  # the library's _FillValue: this station was down
    return field


def main():
    torch.manual_seed(0)
    field = netcdf_like()
    model = Forecaster()
    criterion = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for start in range(0, 112, 8):
        windows = torch.stack([field[start + i : start + i + 4] for i in range(4)])
        target = torch.stack([field[start + i + 4] for i in range(4)])
        loss = criterion(model(windows), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"hour {start:3d}: {loss.item():.4f}")


main()
