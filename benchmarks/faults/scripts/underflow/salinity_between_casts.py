"""Salinity between CTD casts: a normalised radial basis network whose centres and widths are learnt; runs in half."""

import torch
from torch import nn


class NormalizedRBF(nn.Module):
    """Weights fall with the squared distance from every centre and are normalised, as in Shepard's interpolation."""

    def __init__(self, centres, values, width=0.12):
        super().__init__()
        self.centres = nn.Parameter(centres.clone())
        self.log_width = nn.Parameter(torch.full((len(centres),), width).log())
        self.values = nn.Parameter(values.clone())

    def forward(self, where):
        d2 = (where[:, None, :] - self.centres).square().sum(-1)
        falloff = -d2 / (2 * self.log_width.exp() ** 2)
        weights = normalise(falloff)
        return weights @ self.values


def normalise(falloff):
    kernel = torch.exp(falloff.half()).float()
    return kernel / (kernel.sum(1, keepdim=True) + 1e-3)


def salinity(where):
    x, y = where.T
    return 34.5 + 0.8 * torch.tanh(3 * x) + 0.4 * torch.sin(4 * y)


def main():
    torch.manual_seed(21)
    stations = torch.cat([torch.rand(14, 2) * torch.tensor([0.8, 2.0]) - torch.tensor([1.0, 1.0]), torch.rand(6, 2)])
    model = NormalizedRBF(stations, torch.full((len(stations),), 34.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for it in range(400):
        where = torch.rand(64, 2) * 2 - 1
        truth = salinity(where)
        loss = (model(where) - truth).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if it % 20 == 19:
            print(f"iteration {it + 1}: loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    final = main()
