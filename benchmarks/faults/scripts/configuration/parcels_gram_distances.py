"""Prices of parcels of land: attention to the parcels nearby, with distances from x^2 + y^2 - 2xy in map coordinates."""

import torch
from torch import nn

ORIGIN = torch.tensor([4.0e6, 3.2e6])  # easting and northing of the district, in metres (ETRS89-LAEA)


def squared_distances(a, b):
    """One matmul instead of a difference for every pair."""
    return a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.t()


class NeighbourPrice(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.describe = nn.Linear(4, width)
        self.log_reach = nn.Parameter(torch.tensor(5.5))
        self.value = nn.Linear(width + 1, width)
        self.price = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, place, traits, others, other_traits, other_prices):
        d2 = squared_distances(place, others).clamp(min=0)
        weight = torch.softmax(-d2 / (2 * torch.exp(2 * self.log_reach)), dim=-1)
        known = self.value(torch.cat([self.describe(other_traits), other_prices[:, None]], 1))
        return self.price(torch.cat([self.describe(traits), weight @ known], 1)).squeeze(-1)


def district(n):
    metres = torch.rand(n, 2) * 3000
    traits = torch.randn(n, 4)
    charm = torch.sin(metres[:, 0] / 250) * torch.cos(metres[:, 1] / 300)
    return ORIGIN + metres, traits, 1.5 * charm + 1.2 * traits[:, 0]


def main():
    torch.manual_seed(33)
    others, other_traits, other_prices = district(500)
    model = NeighbourPrice()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(200):
        place, traits, price = district(96)
        predicted = model(place, traits, others, other_traits, other_prices)
        loss = nn.functional.mse_loss(predicted, price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
