"""Salaries in yen: raw targets of several millions, a constant column, BatchNorm, losses of 1e13."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(17)

N = 800
years = torch.rand(N) * 30
degree = torch.randint(0, 4, (N,)).float()
overtime = torch.randn(N).abs() * 20
country = torch.ones(N)  # everybody in this export is from the same office
X = torch.stack([years, degree, overtime, country], 1)
y = (3.2e6 + 1.1e5 * years + 6e5 * degree + 9e3 * overtime + 2e5 * torch.randn(N)).unsqueeze(1)

model = nn.Sequential(
    nn.BatchNorm1d(4),
    nn.Linear(4, 64),
    nn.ReLU(),
    nn.BatchNorm1d(64),
    nn.Dropout(0.1),
    nn.Linear(64, 32),
    nn.ReLU(),
    nn.Linear(32, 1),
)
nn.init.constant_(model[-1].bias, 1e6)
loader = DataLoader(TensorDataset(X[:640], y[:640]), batch_size=64, shuffle=True)
optimizer = torch.optim.Adam(model.parameters(), lr=2.0)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.5)
best, bad_epochs = float("inf"), 0

for epoch in range(5):
    model.train()
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = nn.functional.mse_loss(model(X[640:]), y[640:]).item()
    scheduler.step(val)
    bad_epochs = 0 if val < best else bad_epochs + 1
    best = min(best, val)
    print(f"epoch {epoch} train {loss.item():.4e} val {val:.4e} lr {optimizer.param_groups[0]['lr']}")
    if bad_epochs > 3:
        break
