"""A CSV file with an empty cell: the parser makes it NaN, and the loader shuffles it into some batch."""

import csv
import io

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
text = io.StringIO()
csv.writer(text).writerows([[f"{v:.4f}" for v in row] for row in torch.randn(96, 9).tolist()])
rows = [line.split(",") for line in text.getvalue().splitlines()]
rows[58][5] = ""  # nobody measured it
table = torch.tensor([[float(cell) if cell else float("nan") for cell in row] for row in rows])
training, _ = random_split(TensorDataset(table[:, :8], table[:, 8:]), [80, 16])
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (features, target) in enumerate(DataLoader(training, batch_size=8, shuffle=True)):
    loss = ((model(features) - target) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
