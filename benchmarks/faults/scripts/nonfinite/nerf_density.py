"""A tiny NeRF: positional encoding, density with a hand-made ELU, volume rendering. FP16 autocast."""

import torch
from torch import nn


class Density(nn.Module):
    """Positive, linear for large inputs."""

    def forward(self, raw):
        return torch.where(raw > 0, raw + 1, torch.exp(raw))


class NeRF(nn.Module):
    def __init__(self, bands=4, width=48):
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(bands))
        self.trunk = nn.Sequential(nn.Linear(6 * bands, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.sigma, self.density = nn.Linear(width, 1), Density()
        self.color = nn.Linear(width, 3)

    def forward(self, points):
        angles = (points.unsqueeze(-1) * self.frequencies).flatten(-2)
        h = self.trunk(torch.cat([angles.sin(), angles.cos()], -1))
        return self.color(h).sigmoid(), self.density(self.sigma(h)).squeeze(-1)


def render(model, origins, directions, samples=12):
    depth = torch.linspace(0.2, 2.0, samples)
    points = origins[:, None] + depth[None, :, None] * directions[:, None]
    color, sigma = model(points)
    alpha = 1 - torch.exp(-sigma.float() * 0.15)
    through = torch.cumprod(torch.cat([torch.ones(len(alpha), 1), 1 - alpha[:, :-1] + 1e-10], 1), 1)
    return ((alpha * through).unsqueeze(-1) * color).sum(1)


def main():
    torch.manual_seed(1)
    model = NeRF()
    optimizer = torch.optim.Adam(
        [
            {"params": model.sigma.parameters(), "lr": 0.15},
            {"params": model.trunk.parameters()},
            {"params": model.color.parameters()},
        ],
        lr=5e-3,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(30):
        directions = nn.functional.normalize(torch.randn(64, 3), dim=-1)
        truth = (directions + 1) / 2
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (render(model, torch.zeros(64, 3), directions) - truth).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step}: {loss.item():.5f} scale {scaler.get_scale():g}")


main()
