"""An image as two-dimensional Gaussians; after a while needles are added along its diagonal edges."""

import argparse

import torch
from torch import nn

SIZE = 24


class GaussianImage(nn.Module):
    def __init__(self, centres, scales, angles):
        super().__init__()
        n = len(centres)
        self.xy = nn.Parameter(centres)
        self.log_scale = nn.Parameter(scales.log())
        self.theta = nn.Parameter(angles)
        self.colour = nn.Parameter(torch.full((n, 3), 0.3))
        y, x = torch.meshgrid(torch.arange(SIZE) + 0.5, torch.arange(SIZE) + 0.5, indexing="ij")
        self.register_buffer("pixels", torch.stack([x, y], -1).view(1, -1, 2))

    def covariance(self):
        c, s = self.theta.cos(), self.theta.sin()
        sx, sy = self.log_scale.exp().square().unbind(-1)
        return c * c * sx + s * s * sy, c * s * (sx - sy), s * s * sx + c * c * sy

    def forward(self):
        a, b, d = self.covariance()
        det = a * d - b * b
        conic = torch.stack([d, -b, a], -1) / det.unsqueeze(-1)
        dx, dy = (self.pixels - self.xy.unsqueeze(1)).unbind(-1)
        power = -0.5 * (conic[:, :1] * dx * dx + conic[:, 2:] * dy * dy) - conic[:, 1:2] * dx * dy
        weight = power.clamp(max=0).exp()
        return torch.einsum("np,nc->pc", weight, self.colour).view(SIZE, SIZE, 3)


def target_image():
    y, x = torch.meshgrid(torch.linspace(0, 1, SIZE), torch.linspace(0, 1, SIZE), indexing="ij")
    image = torch.stack([x, y, 0.5 * (x + y)], -1)
    image[(x + y) > 1.1] *= 0.3
    image[(x - y).abs() < 0.06] = 1.0
    return image


def densify(model, n):
    """Needles where the image has an edge: long along it, thin across."""
    along = torch.rand(n) * SIZE
    centres = torch.stack([along, SIZE * 1.1 - along], -1)
    scales = torch.tensor([12.0, 0.003]).repeat(n, 1)
    angles = torch.full((n,), -torch.pi / 4) + 0.3 * torch.randn(n)
    old = model.state_dict()
    grown = GaussianImage(
        torch.cat([old["xy"], centres]),
        torch.cat([old["log_scale"].exp(), scales]),
        torch.cat([old["theta"], angles]),
    )
    with torch.no_grad():
        grown.colour[: len(old["colour"])] = old["colour"]
        grown.colour[len(old["colour"]) :] = 0.01
    return grown


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--densify-at", type=int, default=14)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    torch.manual_seed(2)
    target = target_image()
    model = GaussianImage(torch.rand(40, 2) * SIZE, torch.full((40, 2), 2.5), torch.rand(40) * 3.14)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for i in range(args.iterations):
        if i == args.densify_at:
            model = densify(model, 40)
            optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        loss = nn.functional.l1_loss(model(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            print(f"{i} gaussians {len(model.xy)} l1 {loss.item():.4f}")


if __name__ == "__main__":
    main()
