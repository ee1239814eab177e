"""Radar nowcasting: a small convolutional recurrent net predicts the next rain field; root-mean-square error."""

import math

import torch
from torch import nn


class RMSELoss(nn.Module):
    def forward(self, prediction, target):
        return torch.sqrt(nn.functional.mse_loss(prediction, target))


class ConvGRUCell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.gates = nn.Conv2d(inputs + hidden, 2 * hidden, 3, padding=1, bias=False)
        self.candidate = nn.Conv2d(inputs + hidden, hidden, 3, padding=1, bias=False)

    def forward(self, x, h):
        reset, update = self.gates(torch.cat([x, h], 1)).sigmoid().chunk(2, 1)
        candidate = self.candidate(torch.cat([x, reset * h], 1)).tanh()
        return (1 - update) * h + update * candidate


class Nowcaster(nn.Module):
    """No biases: where it is dry all around it stays dry."""

    def __init__(self, hidden=6):
        super().__init__()
        self.hidden = hidden
        self.cell = ConvGRUCell(1, hidden)
        self.head = nn.Sequential(
            nn.Conv2d(hidden, hidden, 1, bias=False), nn.ReLU(), nn.Conv2d(hidden, 1, 1, bias=False)
        )

    def forward(self, frames):
        batch, time, height, width = frames.shape
        h = frames.new_zeros(batch, self.hidden, height, width)
        for t in range(time):
            h = self.cell(frames[:, t : t + 1], h)
        return frames[:, -1] + self.head(h).squeeze(1)


def season(days, generator, size=10, frames=4):
    """Showers that drift east, one batch a day; a dry spell is rare but happens."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    for day in range(days):
        wet = day % 353 < 350
        cx = torch.rand(4, 1, 1, 1, generator=generator) * size + torch.arange(frames)[None, :, None, None]
        cy = torch.rand(4, 1, 1, 1, generator=generator) * size
        rain = 3 * torch.exp(-((x - cx) ** 2 + (y - cy) ** 2) / 6) * wet
        yield torch.where(rain > 0.1, rain, 0.0)  # below the radar's threshold


def main():
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(3)
    model, criterion = Nowcaster(), RMSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for day, rain in enumerate(season(365, generator)):
        loss = criterion(model(rain[:, :-1]), rain[:, -1])
        if not math.isfinite(loss.item()):
            print(f"day {day}: loss is {loss.item()}, ending here")
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if day % 50 == 0:
            print(f"day {day:3d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
