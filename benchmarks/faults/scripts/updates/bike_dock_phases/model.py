import torch
import torch.nn as nn


class DockNet(nn.Module):
    """Demand at a dock: weather and history are read by two branches, the dock is an embedding."""

    def __init__(self, docks=30, d=24):
        super().__init__()
        self.dock = nn.Embedding(docks, 8)
        self.history = nn.GRU(1, d, batch_first=True)
        self.weather = nn.Sequential(nn.Linear(5, d), nn.SiLU(), nn.Linear(d, d))
        self.head = nn.Sequential(nn.Linear(2 * d + 8, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, dock, history, weather):
        _, h = self.history(history.unsqueeze(-1))
        z = torch.cat([self.dock(dock), h[0], self.weather(weather)], -1)
        return self.head(z).squeeze(-1)
