"""A surrogate for a field solver: geometry of a sensor to its capacitances; targets come in the solver's own units."""

import torch
from torch import nn


def solver(geometry):
    """Capacitances of eight electrodes, in nanofarads: some 1e-3."""
    gap, area, tilt = geometry[:, :1], geometry[:, 1:2], geometry[:, 2:3]
    k = torch.arange(1, 9) / 8
    return 1e-3 * (area * k / (0.5 + gap) + 0.3 * torch.sin(3 * tilt * k))


class Surrogate(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, 8)

    def forward(self, geometry):
        h = torch.tanh(self.inp(geometry))
        for layer in self.hidden:
            h = h + torch.tanh(layer(h))
        return 1e-3 * self.out(h)


def train(steps=70, batch=256):
    torch.manual_seed(3103)
    model = Surrogate()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-15)
    for step in range(steps):
        geometry = torch.rand(batch, 3)
        target = solver(geometry)
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = model(geometry)
        error = predicted.float() - target
        loss = error.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            relative = loss.item() / target.square().mean().item()
            print(f"[{step:3d}] mse {loss.item():.3e}  relative loss {relative:.4f}")
    return model


if __name__ == "__main__":
    train()
