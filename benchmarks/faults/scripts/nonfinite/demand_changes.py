"""DLinear-style forecast of electricity demand from relative changes, hour by hour; numpy prepares the series."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def load_meters(n_meters=6, hours=400, seed=3):
    rng = np.random.default_rng(seed)
    t = np.arange(hours)
    load = 3 + np.sin(2 * np.pi * t / 24)[None] + 0.2 * rng.standard_normal((n_meters, hours))
    load = np.abs(load).astype(np.float32)
    load[4, 317:319] = 0.0  # power cut
    return load


def relative_change(x):
    with np.errstate(all="ignore"):
        return np.diff(x, axis=-1) / x[..., :-1]


class Windows(Dataset):
    def __init__(self, load, past=48, ahead=6):
        self.change = relative_change(load).astype(np.float32)
        self.level = load[:, 1:]
        self.past, self.ahead = past, ahead
        self.starts = range(0, self.change.shape[1] - past - ahead, 7)

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, i):
        s = self.starts[i]
        e = s + self.past
        return {"x": self.change[:, s:e], "level": self.level[:, e - 1], "y": self.level[:, e : e + self.ahead]}


class DLinear(nn.Module):
    def __init__(self, past=48, ahead=6, kernel=13):
        super().__init__()
        self.smooth = nn.AvgPool1d(kernel, stride=1, padding=kernel // 2, count_include_pad=False)
        self.trend = nn.Linear(past, ahead)
        self.season = nn.Linear(past, ahead)

    def forward(self, x, level):
        trend = self.smooth(x)
        return level.unsqueeze(-1) * (1 + self.trend(trend) + self.season(x - trend))


def collate(items):
    return {k: torch.from_numpy(np.stack([it[k] for it in items])) for k in items[0]}


torch.manual_seed(14)
model = DLinear()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Windows(load_meters()), batch_size=4, collate_fn=collate)
for epoch in range(2):
    for i, batch in enumerate(loader):
        loss = nn.functional.huber_loss(model(batch["x"], batch["level"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 4 == 0:
            print(f"epoch {epoch} batch {i} loss {loss.item():.4f}")
