"""Robust regression on sensor streams. A stuck sensor has no spread: such batches are seen by isfinite and left out."""

import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self, inputs=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.location = nn.Linear(32, 1)

    def forward(self, x):
        return self.location(self.body(x)).squeeze(-1)


def scaled_cauchy(error, reference):
    """Negative log likelihood with the batch's own spread as scale."""
    spread = (reference - reference.median()).abs().median()
    return (torch.log1p((error / spread) ** 2) + torch.log(spread)).mean()


def streams(steps, generator):
    mix = torch.randn(6, generator=generator)
    for step in range(steps):
        x = torch.randn(48, 6, generator=generator)
        y = x @ mix + 0.1 * torch.randn(48, generator=generator)
        if step % 11 == 7:
            y = torch.full_like(y, 3.25)
        yield x, y


def main():
    torch.manual_seed(1)
    model = Regressor()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    skipped = 0
    for step, (x, y) in enumerate(streams(45, torch.Generator().manual_seed(4))):
        opt.zero_grad()
        loss = scaled_cauchy(model(x) - y, y)
        if not torch.isfinite(loss):
            skipped += 1
            continue
        loss.backward()
        opt.step()
        if step % 9 == 0:
            print(f"step {step} nll {loss.item():.4f} skipped {skipped}")


if __name__ == "__main__":
    main()
