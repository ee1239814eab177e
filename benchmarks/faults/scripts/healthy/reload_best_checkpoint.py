"""Early stopping with patience: when validation gets no better, the best weights and states come back at a third of the rate."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Forecaster(nn.Module):
    def __init__(self, window=24):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 5), nn.ELU(), nn.Conv1d(16, 16, 5, stride=2), nn.ELU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 8, 32), nn.ELU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x):
        return self.head(self.conv(x.unsqueeze(1))).squeeze(-1)


def demand(n):
    t0 = 500 * torch.rand(n, 1)
    t = t0 + torch.arange(25)
    y = 100 + 20 * torch.sin(t / 3.8) + 8 * torch.sin(t / 1.3) + 2 * torch.randn(n, 25)
    return TensorDataset((y[:, :24] - 100) / 20, (y[:, 24] - 100) / 20)


def main():
    torch.manual_seed(7034)
    loader, (val_x, val_y) = DataLoader(demand(384), batch_size=64, shuffle=True), demand(256).tensors
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    best, bad, kept = float("inf"), 0, None
    for epoch in range(16):
        model.train()
        for x, y in loader:
            loss = F.huber_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            val = F.huber_loss(model(val_x), val_y).item()
        print(f"epoch {epoch:2d} val loss {val:.5f} lr {optimizer.param_groups[0]['lr']:.1e}")
        if val < best:
            best, bad = val, 0
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            continue
        bad += 1
        if bad == 2:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            for group in optimizer.param_groups:
                group["lr"] /= 3
            bad = 0
            print(f"epoch {epoch:2d} back to {best:.5f}")


main()
