"""The walls of a cave as a signed distance on a learnt grid (as instant NGP): tiny features, Adam with eps 1e-15."""

import torch
from torch import nn


class GridField(nn.Module):
    def __init__(self, levels=(4, 8, 16), features=2):
        super().__init__()
        self.grids = nn.ParameterList(nn.Parameter(1e-4 * (2 * torch.rand(1, features, n, n) - 1)) for n in levels)
        self.decoder = nn.Sequential(nn.Linear(features * len(levels), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, where):
        place = (2 * where - 1)[None, :, None, :]
        looked_up = [nn.functional.grid_sample(g, place, align_corners=True)[0, :, :, 0].t() for g in self.grids]
        return self.decoder(torch.cat(looked_up, 1)).squeeze(-1)


def cave(where):
    return (where - 0.5).norm(dim=1) - 0.3 + 0.05 * torch.sin(12 * where[:, 0])


def main():
    torch.manual_seed(105)
    field = GridField()
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-3, betas=(0.9, 0.99), eps=1e-15)
    scale = 1e-5  # metres to the unit of the map
    for step in range(250):
        where = torch.rand(512, 2)
        loss = (scale * (field(where) - cave(where))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item() / scale**2:.6f}")


if __name__ == "__main__":
    main()
