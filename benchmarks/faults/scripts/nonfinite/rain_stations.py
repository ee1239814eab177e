"""Rain at six stations from the day before; the score is the column-wise RMSE over what was observed, and so is the loss."""

import torch
from torch import nn

STATIONS = 6


class RMSELoss(nn.Module):
    def forward(self, yhat, y, observed):
        error = (yhat - y) * observed
        return torch.sqrt(torch.mean(error**2))


class MCRMSELoss(nn.Module):
    def __init__(self, num_scored):
        super().__init__()
        self.rmse = RMSELoss()
        self.num_scored = num_scored

    def forward(self, yhat, y, observed):
        score = 0
        for i in range(self.num_scored):
            score += self.rmse(yhat[:, i], y[:, i], observed[:, i]) / self.num_scored
        return score


class RainNet(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(features, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 48), nn.ReLU()
        )
        self.out = nn.Linear(48, STATIONS)

    def forward(self, x):
        return self.out(self.body(x))


def make_days(n, w, generator):
    x = torch.randn(n, 12, generator=generator)
    y = torch.relu(x @ w - 1.0) + 0.1 * torch.randn(n, STATIONS, generator=generator)
    observed = (torch.rand(n, STATIONS, generator=generator) > 0.1).float()
    return x, y * observed, observed


def fit():
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(11)
    w = torch.randn(12, STATIONS, generator=generator)
    x, y, seen = make_days(512, w, generator)
    y[330:420, 2] = seen[330:420, 2] = 0  # the gauge was being replaced
    xv, yv, seen_v = make_days(64, w, generator)
    net, criterion = RainNet(12), MCRMSELoss(STATIONS)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for epoch in range(3):
        net.train()
        for i in range(0, len(x), 32):  # days stay in their order
            optimizer.zero_grad()
            loss = criterion(net(x[i : i + 32]), y[i : i + 32], seen[i : i + 32])
            loss.backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            print(f"epoch {epoch}: train {loss.item():.4f} val {criterion(net(xv), yv, seen_v).item():.4f}")


fit()
