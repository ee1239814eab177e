"""A loaded round membrane as a physics-informed network in polar features; random points first, then a regular grid."""

import torch
from torch import nn


class MembraneNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, xy):
        r = torch.sqrt((xy**2).sum(-1, keepdim=True))
        u = self.net(torch.cat([xy, r], -1))
        return u * (1 - r)  # clamped at the rim


def laplacian(u, xy):
    (grad,) = torch.autograd.grad(u.sum(), xy, create_graph=True)
    total = 0.0
    for i in range(2):
        (second,) = torch.autograd.grad(grad[:, i].sum(), xy, create_graph=True)
        total = total + second[:, i]
    return total


def load_at(xy):
    return -4.0 - torch.cos(3 * xy[:, 0])


def random_points(n):
    angle, radius = torch.rand(n) * 2 * torch.pi, torch.rand(n).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1)


def grid_points(n):
    axis = torch.linspace(-1, 1, n)
    points = torch.cartesian_prod(axis, axis)
    return points[(points**2).sum(-1) < 1]


def main():
    torch.manual_seed(19)
    model = MembraneNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    for step in range(36):
        xy = random_points(200) if step < 20 else grid_points(17)
        xy.requires_grad_(True)
        residual = laplacian(model(xy).squeeze(-1), xy) - load_at(xy)
        loss = residual.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 6 == 0:
            print(f"step {step} residual {loss.item():.4f}")


if __name__ == "__main__":
    main()
