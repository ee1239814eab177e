"""Meteor fragments as a set: Chamfer distance between sets of different sizes, padding is infinitely far."""

import torch
from torch import nn


class SetDecoder(nn.Module):
    def __init__(self, d_in=6, points=10, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.points = nn.Linear(width, 3 * points)
        self.exists = nn.Linear(width, points)

    def forward(self, light):
        h = self.net(light)
        return self.points(h).view(len(light), -1, 3), self.exists(h)


def chamfer(a, b, real_b):
    """a: (n, p, 3), b: (n, q, 3), padded where not real_b; n may hold events without any fragment."""
    d = (a.unsqueeze(2) - b.unsqueeze(1)).square().sum(-1)
    d = torch.where(real_b.unsqueeze(1), d, float("inf"))
    to_b = d.min(2).values  # inf for an event that has no fragment
    to_a = d.min(1).values  # inf for padding
    some = real_b.any(1)
    forth = to_b[some].mean()
    back = to_a[real_b].mean()
    return forth + back


def events(n, most=7):
    count = torch.randint(0, most + 1, (n,))
    centre, spread = torch.randn(n, 1, 3), 0.2 + torch.rand(n, 1, 1)
    fragments = centre + spread * torch.randn(n, most, 3)
    real = torch.arange(most) < count[:, None]
    fragments = fragments.masked_fill(~real.unsqueeze(-1), float("nan"))
    light = torch.cat([centre.squeeze(1), spread.squeeze(1), count.unsqueeze(1) / most, torch.rand(n, 1)], -1)
    return light, torch.nan_to_num(fragments, nan=1e6), real


def main():
    torch.manual_seed(99)
    model = SetDecoder()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.Adamax(model.parameters(), lr=4e-3)
    for step in range(25):
        light, fragments, real = events(24)
        points, exists = model(light)
        n_real = real.sum(1, keepdim=True)
        wanted = (torch.arange(exists.shape[1]) < n_real).float()
        loss = chamfer(points, fragments, real) + nn.functional.binary_cross_entropy_with_logits(exists, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step > 15:
            averaged.update_parameters(model)
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
