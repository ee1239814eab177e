"""Quantile regression of house prices; the head works in half precision "like the rest"."""

import torch
from torch import nn

QUANTILES = torch.tensor([0.1, 0.5, 0.9])


class PriceScaler(nn.Module):
    """Brings prices (in dollars) to units of a hundred thousand, in the dtype of the predictions."""

    def __init__(self, unit):
        super().__init__()
        self.unit = unit

    def forward(self, price, like):
        return price.to(like.dtype) / self.unit


class QuantileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 3))
        self.scale = PriceScaler(1e5)

    def forward(self, features, price):
        predicted = self.net(features)
        return predicted, self.scale(price, predicted).unsqueeze(-1)


def pinball(predicted, target):
    error = target.float() - predicted.float()
    return torch.maximum(QUANTILES * error, (QUANTILES - 1) * error).mean()


def market(n, year):
    features = torch.rand(n, 6)
    price = 12_000 + 20_000 * features[:, 0] + 15_000 * features[:, 1]
    return features, price * 1.06**year


def main():
    torch.manual_seed(0)
    net = QuantileNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for year in range(16):  # oldest sales first
        features, price = market(64, year)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            predicted, target = net(features, price)
        loss = pinball(predicted, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"year {year}: {loss.item():.5f}")


main()
